"""Sources over other sources: adapted, concatenated, selected, cut into windows."""
