"""The API types: what a person writes and what the operator answers."""
