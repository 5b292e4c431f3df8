"""Files in folders, or in ZIP archives, as records."""
