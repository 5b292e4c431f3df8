"""What a conversion has written, to be compared with another."""

import json
import re

RUN = re.compile("-append-[0-9a-f]{8}")


def content(directory):
    """The bytes of all files; of journals, logs and names what does not depend on the time and the run."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = RUN.sub("-append-RUN", str(path.relative_to(directory)))
        if path.is_dir() or name.endswith("lock.mdb"):
            continue
        found[name] = path.read_bytes()
        if name == "dataload.json":
            found[name] = RUN.sub("-append-RUN", found[name].decode())
        if name.endswith(".convert.json"):
            table = json.loads(found[name])
            for shard in table["finished"].values():
                del shard["mtime_ns"]
            table.pop("run", None)
            found[name] = table
        if name.endswith(".log"):
            lines = [json.loads(line.partition(b" ")[2]) for line in found[name].splitlines()]
            found[name] = [{key: line[key] for key in line if key not in ("run", "mtime_ns")} for line in lines]
    return found
