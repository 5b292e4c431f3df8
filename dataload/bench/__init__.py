"""Formats and loaders side by side: what ``dataload bench`` runs.

Each measurement is a process of its own, which opens the data, takes batches for a while and tells what that cost:
`task` says what to do, `child` does it, `runner` interleaves the repeats, `results` are the figures.
"""
