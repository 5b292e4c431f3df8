"""Jobs over the shards of a data set: conversions, indexes, statistics and checks, whole, in parts or by an engine."""
