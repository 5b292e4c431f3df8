"""Video files: a record for each frame."""
