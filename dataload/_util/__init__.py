"""Small helpers without a place of their own: randomness, indexing, checks, optional imports."""
