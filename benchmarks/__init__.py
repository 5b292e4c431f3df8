"""Regression cases of this library, and the peers that they measure."""
