"""What isolates: bubblewrap namespaces on one machine, or nothing at all (simulated)."""
