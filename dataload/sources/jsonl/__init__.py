"""JSON Lines: a JSON object on each line of a file."""
