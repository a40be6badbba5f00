"""Figures that we promise, each beside what anyone would use instead: `make bench`, or `make bench NAME=codec`."""
