"""Drivers turn a plan into something that runs."""
