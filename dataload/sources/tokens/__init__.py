"""Flat files of tokens."""
