"""The Syrah format."""
