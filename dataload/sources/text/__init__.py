"""Text files: a record for each file, line or paragraph."""
