"""Helpers shared by all packages: randomness, indexing, checks, optional imports."""
