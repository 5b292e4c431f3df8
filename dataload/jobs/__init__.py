"""Jobs over the shards of a data set: conversions, indexes and statistics, whole, in parts or by an engine."""
