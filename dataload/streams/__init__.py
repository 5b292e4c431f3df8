"""Batch rows that continue the sequence they follow; the place of stream samplers."""

__all__: list[str] = []
