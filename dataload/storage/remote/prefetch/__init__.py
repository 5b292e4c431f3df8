"""Data of the next steps, fetched before they are read."""
