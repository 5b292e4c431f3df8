"""Conversion between the bytes of records and their fields. Pure (no I/O)."""
