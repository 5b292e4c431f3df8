"""Facts about shards: manifests, logs of jobs, statistics, evidence that files are unchanged."""
