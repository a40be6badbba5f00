"""The simulator room: the one place that may import other rooms."""
