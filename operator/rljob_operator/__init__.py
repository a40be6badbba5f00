"""The operator room: a manifest in, running components out."""
