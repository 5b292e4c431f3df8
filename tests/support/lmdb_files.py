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


def make(path, databases, *, flags=None, **options):
    """An environment that lmdb itself writes: the name of a database, or None -> keys and values in any order."""
    options = {"map_size": 1 << 26, "max_dbs": len(databases) + 4, "lock": False, "sync": False, **options}
    with lmdb.open(str(path), **options) as environment:
        for name, items in databases.items():
            database = environment.open_db(name, **(flags or {}))
            with environment.begin(write=True, db=database) as txn:
                for key, value in items:
                    txn.put(key, value)
    return path


def stored(path, name=None):
    """What lmdb itself reads."""
    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=1) as environment, environment.begin() as txn:
        return list(txn.cursor(db=name))
