"""Version 0.2 and this one read each other's files and continue each other's loaders.

    python tests/environments/exchange.py OTHER      OTHER is an interpreter with 0.2, as ``make exchange`` installs it

Each of the two writes data sets and states of loaders, and both must read the same records, fingerprints and batches.
The part that runs in both, below `write`, uses only names that both have.
"""

# ruff: noqa: T201 - a script that tells what it found

import hashlib
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

RECORDS = 60
FILES = {  # name -> destination, options of the writer, options of the reader
    "syrah": ("a.syr", {}, {}),
    "syrah, shards": ("shards/b.syr", {"records_per_shard": 16}, {}),
    "tar": ("c.tar", {}, {"decode": "auto"}),
    "tar, shards": ("tars/d.tar", {"shards": 3}, {}),
    "lmdb": ("e.lmdb", {}, {}),
    "torchrecord": ("torchrecord:f", {}, {}),
    "array_record": ("g.array_record", {"codec": "npz"}, {}),
    "parquet": ("h.parquet", {}, {}),
    "arrow": ("i.arrow", {}, {}),
    "jsonl": ("j.jsonl", {}, {}),
    "tfrecord": ("k.tfrecord", {"codec": "example"}, {"codec": "example"}),
    "tokens": ("tokens:l.npy", {}, {"window": 8}),
}


def main(other: str) -> int:
    """Let both versions write and read; return whether anything differs."""
    failed = False
    names = {sys.executable: "this version", other: "0.2"}
    for writer, reader in ((other, sys.executable), (sys.executable, other)):
        with tempfile.TemporaryDirectory() as folder:
            found = [
                run(python, step, folder) for python, step in ((writer, "write"), (writer, "read"), (reader, "read"))
            ]
        told = found[1] | found[0]  # the batches that followed the states, not those of the loaded ones
        differing = [name for name in told if told[name] != found[2].get(name)]
        states = sum(name.startswith("state ") for name in told)
        print(f"{names[reader]} reads {names[writer]}: {len(told) - states} values of files, {states} states", end=": ")
        print("equal" if not differing else "", *differing, sep="\n  " if differing else "")
        failed |= bool(differing) or not states
    return failed


def run(python: str, step: str, folder: str) -> dict[str, str]:
    """Run a step in an interpreter, and return what it prints: digests by name."""
    command = [python, "-I", __file__, step, folder]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def write(folder: Path) -> dict[str, str]:
    """Write all data sets, and states of loaders with the batches that follow; return their digests."""
    import dataload

    generator = np.random.default_rng(0)
    for name, (path, options, _) in FILES.items():
        kind, _, place = path.rpartition(":")
        (folder / place).parent.mkdir(exist_ok=True)
        with dataload.create(f"{kind}{kind and ':'}{folder / place}", **options) as writer:
            for index in range(RECORDS):
                x = generator.random((2, 3), np.float32)
                writer.write(np.arange(5, dtype=np.int64) + index if kind == "tokens" else record_for(name, x, index))
    digests, states = {}, {}
    for name, make in loaders(folder).items():
        with make() as loader:
            list(islice(loader, 2))
            batches = iter(loader)  # epoch 1
            list(islice(batches, 2))
            states[name] = loader.state_dict()
            digests[f"state {name}"] = digest(list(islice(batches, 2)))
    (folder / "states.json").write_text(json.dumps(states))
    return digests


def record_for(name: str, x: np.ndarray, index: int) -> dict:
    """Return a record as a format takes it."""
    label, text = index % 7, f"record {index} é"
    if name.startswith("tar"):
        return {"__key__": f"{index:04}", "npy": x, "cls": label, "txt": text}
    if name == "torchrecord":
        return {"1": x, "2": np.array([label])}
    if name == "jsonl":
        return {"label": label, "text": text, "list": [index, 2]}
    if name == "tfrecord":
        return {"x": x.ravel(), "label": np.array([label]), "text": [text.encode()]}
    return {"x": x, "label": label, "text": text}


def read(folder: Path) -> dict[str, str]:
    """Return digests of all records, the fingerprints, and the batches that follow the states."""
    import dataload

    digests = {}
    for name, (path, _, options) in FILES.items():
        with opened(folder, path, options) as source:
            digests[f"records of {name}"] = digest(list(source))
            digests[f"fingerprint of {name}"] = source.fingerprint()
    assert dataload.__version__
    for name, state in json.loads((folder / "states.json").read_text()).items():
        with loaders(folder)[name]() as loader:
            loader.load_state_dict(state)
            digests[f"state {name}"] = digest(list(islice(loader, 2)))
    return digests


def opened(folder: Path, path: str, options: dict):
    """Open a data set of `FILES`; one in shards by its directory."""
    import dataload

    kind, _, place = path.rpartition(":")
    target = folder / place
    target = target.parent if target.parent != folder else target
    return dataload.open(f"{kind}{kind and ':'}{target}", **options)


def loaders(folder: Path) -> dict:
    """Return functions that build loaders, by name."""
    from dataload import Loader, mix, samplers
    from dataload.streams import MultiStreamLoader

    def of(name: str, **settings):
        return lambda: Loader(opened(folder, FILES[name][0], FILES[name][2]), **{"batch_size": 7, **settings})

    sequences = [list(range(100 * i, 100 * i + length)) for i, length in enumerate((12, 7, 21, 1, 22, 17))]
    return {
        **{f"of {name}": of(name, shuffle=True, seed=3) for name in FILES},
        "in order": of("syrah"),
        "by shards": of("syrah, shards", shuffle="shards", seed=5),
        "with several workers": of("tar, shards", shuffle=True, num_workers=2),
        "rank 1 of 3": of("syrah", shuffle=True, rank=1, world_size=3),
        "of a global batch": of("parquet", shuffle=True, batch_size=None, global_batch_size=8, rank=0, world_size=2),
        "dropped tail": of("arrow", tail="drop"),
        "weighted": of("syrah", sampler=samplers.Weighted([*range(1, RECORDS + 1)], 50, 2)),
        "selection": lambda: Loader(opened(folder, "a.syr", {})[10:50:3], batch_size=4, shuffle=True),
        "mix": lambda: Loader(
            mix({"a": opened(folder, "a.syr", {}), "h": opened(folder, "h.parquet", {})}, {"a": 2, "h": 1}),
            batch_size=4,
            shuffle=True,
        ),
        "streams": lambda: MultiStreamLoader(iter, sequences, batch_size=3, seed=1),
        "streams, split": lambda: MultiStreamLoader(iter, sequences, batch_size=3, mode="split"),
    }


def digest(value: object) -> str:
    """Return a hash of records or batches: names, dtypes, shapes and bytes."""
    found = hashlib.sha256()

    def add(value) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                found.update(f"{key}:".encode())
                add(value[key])
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):  # a text column was a list
            found.update(f"list {len(value)}".encode())
            for item in value:
                add(item)
        elif isinstance(value, (str, bytes)):
            found.update(repr(value).encode())
        elif hasattr(value, "data") and hasattr(value, "offsets"):  # a BytesColumn
            add(list(value))
        else:
            array = np.asarray(value)
            found.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())

    add(value)
    return found.hexdigest()


if __name__ == "__main__":
    if sys.argv[1] in ("write", "read"):
        warnings.simplefilter("ignore", DeprecationWarning)
        print(json.dumps({"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))))
    else:
        sys.exit(main(sys.argv[1]))
