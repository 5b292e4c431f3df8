"""What tests of LMDB share."""

import lmdb


def lib_versions():
    """The versions of LMDB that py-lmdb has: 0 for 0.9, 1 for 1.0."""
    for version in (0, 1):
        try:
            lmdb.version(lib_version=version)
        except (lmdb.Error, TypeError):
            continue
        yield version
