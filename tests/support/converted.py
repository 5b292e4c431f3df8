"""What a conversion has written, to be compared with another."""

import json


def content(directory):
    """The bytes of all files; of journals what does not depend on the time."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_dir() or name.endswith("lock.mdb"):
            continue
        found[name] = path.read_bytes()
        if name.endswith(".convert.json"):
            table = json.loads(found[name])
            for shard in table["finished"].values():
                del shard["mtime_ns"]
            found[name] = table
    return found
