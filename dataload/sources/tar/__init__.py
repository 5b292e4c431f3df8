"""Tar archives of samples, with or without an index."""
