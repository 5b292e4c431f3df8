"""Where bytes are: local files now."""
