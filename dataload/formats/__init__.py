"""The bytes of each format: parsing and building, no files, no policy."""
