"""Warm sandboxes in, claims out. Nothing here runs a policy or knows a task."""
