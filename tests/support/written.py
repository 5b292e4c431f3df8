"""Files of records."""

import dataload


def written(path, records, **options):
    """Write records to a file, and return its path."""
    with dataload.create(path, **options) as writer:
        writer.extend(records)
    return path
