"""Record bytes to fields and back. Pure: no files."""
