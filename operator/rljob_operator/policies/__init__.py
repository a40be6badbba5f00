"""One decision per file, pure and table-tested."""
