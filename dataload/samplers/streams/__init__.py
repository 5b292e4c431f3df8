"""Arithmetic of rows that continue."""
