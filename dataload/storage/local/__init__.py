"""Local files, mapped into memory."""
