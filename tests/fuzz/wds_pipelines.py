"""Random WebDataset pipelines, by webdataset and by ours: ``python tests/fuzz/wds_pipelines.py --pipelines 500``.

Both must give equal values, or errors of one class. Where a stage draws at random, the samples must be the same in any
order. Where every stage works on single samples, a state must also continue at any value.
"""

import gc
import itertools
import json
import random
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from drive import drive
from made_files import image, npy, pack

MOST = 60  # values of a pipeline that are compared


def write_archives(folder: Path) -> list[str]:
    """Write archives of 7, 1, 4, 5 and 2 samples, and return their paths; the last has files that are no components."""
    paths, number = [], 0
    for shard, count in enumerate((7, 1, 4, 5, 2)):
        files: list[tuple[str, bytes]] = []
        for _ in range(count):
            names = {
                "cls": str(number).encode(),
                "txt": f"text {number}".encode(),
                "json": json.dumps({"a": number}).encode(),
                "Seg.PNG": image(number),
                "x.npy": npy(np.arange(3.0) + number),
            }
            if number % 4 == 3:
                names["extra.bin"] = bytes([number])
            files += [(f"dir/k{number:03d}.{name}", data) for name, data in names.items()]
            if shard == 4:
                files.append(("README", b"no component"))
            number += 1
        paths.append(str(pack(folder / f"s-{shard:02d}.tar", files)))
    return paths


# Functions of users. They take samples as dicts, tuples or batches, and some fail.


def number_of(value: Any) -> int:
    return sum(re.sub(r"/[^' ]*/", "/", str(plain(value))).encode()) % 97


class Fails:
    """Raises for some values."""

    def __init__(self, every: int) -> None:
        self.every = every

    def __call__(self, value: Any) -> Any:
        if number_of(value) % self.every == 0:
            raise KeyError("no")
        return value


class Drops(Fails):
    """Returns None for some values."""

    def __call__(self, value: Any) -> Any:
        return None if number_of(value) % self.every == 0 else value


class Chooses(Fails):
    """Returns whether a value is wanted."""

    def __call__(self, value: Any) -> bool:
        return number_of(value) % self.every != 0


def same(value: Any) -> Any:
    """Return a value."""
    return value


def pairs(source: Any) -> Any:
    """Join neighbours: a stage of a user's own."""
    for first in source:
        yield first, next(source, None)


def add_cls(key: str) -> dict[str, Any]:
    """Return more fields of a sample."""
    return {"more": len(key)}


def stages(rng: random.Random) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Return the calls that make a random pipeline; a third of them is as documents show it."""
    handlers = ["reraise_exception", "ignore_and_continue", "ignore_and_stop"]

    def handler() -> dict[str, Any]:
        return {"handler": rng.choice([handlers[0], *handlers])}

    every = rng.choice([2, 3, 5, 50])
    choices = [
        lambda: ("decode", rng.choice([(), ("rgb8",), ("torchrgb",), ("pil",), ("l",)]), handler()),
        lambda: (
            "decode",
            (),
            {"only": rng.choice(["cls", ["cls", "txt"], "cls json"]), "partial": rng.random() < 0.5},
        ),
        lambda: ("map", (rng.choice([same, Fails(every), Drops(every)]),), handler()),
        lambda: ("map_dict", (), {rng.choice(["cls", "txt", "none"]): rng.choice([same, Fails(every)]), **handler()}),
        lambda: ("to_tuple", rng.choice([("cls txt",), ("seg.png;jpg", "cls"), ("cls",), ("none",)]), handler()),
        lambda: ("to_tuple", ("none;txt", "other"), {"missing_is_error": False}),
        lambda: ("map_tuple", rng.choice([(same,), (None, same), (Fails(every),)]), handler()),
        lambda: ("rename", (), {"image": "seg.png;jpg", "keep": rng.random() < 0.5}),
        lambda: ("rename_keys", (("label", "cls"),), {"keep_unselected": rng.random() < 0.7}),
        lambda: ("extract_keys", ("*.cls", "*.txt"), {}),
        lambda: ("xdecode", (), {"must_decode": False}),
        lambda: ("select", (Chooses(every),), {}),
        lambda: ("slice", rng.choice([(3,), (2, 9), (1, 12, 3)]), {}),
        lambda: ("batched", (rng.choice([1, 2, 4, 5]),), {"partial": rng.random() < 0.7}),
        lambda: ("batched", (3,), {"collation_fn": None}),
        lambda: ("listed", (3,), {}),
        lambda: ("unbatched", (), {}),
        lambda: ("unlisted", (), {}),
        lambda: ("shuffle", (rng.choice([0, 2, 6, 40]),), {}),
        lambda: ("mcached", (), {}),
        lambda: ("compose", (pairs,), {}),
        lambda: ("compose", ("associate", add_cls), {}),
        lambda: ("with_epoch", (rng.choice([1, 7, 30]),), {}),
        lambda: ("repeat", (rng.choice([1, 2, 3]),), {}),
        lambda: ("repeat", (), {"nbatches": 9}),
    ]
    if rng.random() < 0.34:
        size = rng.choice([2, 4, 5])
        return [
            *([choices[18]()] if rng.random() < 0.5 else []),
            ("decode", ("rgb8",), handler()),
            *([("map", (rng.choice([Fails(every), Drops(every)]),), handler())] if rng.random() < 0.5 else []),
            ("to_tuple", ("seg.png", "cls"), {}),
            ("batched", (size,), {"partial": rng.random() < 0.7}),
            *([rng.choice([choices[22], choices[23]])()] if rng.random() < 0.5 else []),
        ]
    return [rng.choice(choices)() for _ in range(rng.randint(0, 6))]


def build(wds: Any, urls: Any, settings: dict[str, Any], calls: Any) -> Any:
    """Return the pipeline of `wds` that the calls make."""
    data = wds.WebDataset(urls, **_named(wds, settings))
    for name, arguments, options in calls:
        if arguments[:1] == ("associate",):
            arguments = (wds.associate(arguments[1]),)
        data = getattr(data, name)(*arguments, **_named(wds, options))
    return data


def _named(wds: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(wds, value) if name == "handler" else value for name, value in options.items()}


def run(data: Any) -> tuple[list[Any], str | None]:
    """Return what a pipeline gives, and the class of the error that ends it."""
    values: list[Any] = []
    try:
        values.extend(plain(value) for value in itertools.islice(iter(data), MOST))
    except Exception as error:  # of any class: it is compared
        return values, type(error).__name__
    return values, None


def plain(value: Any) -> Any:
    """Return something that compares by ``==``, and tells types apart."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    if isinstance(value, (str, bytes, int, float, type(None))):
        return value
    array = np.asarray(value)
    return [type(value).__name__, str(array.dtype), array.shape, array.tobytes()]


def check(seed: int, theirs: Any, ours: Any, paths: list[str]) -> str:
    """Compare one pipeline; return what it was: "equal", "random" or "state"."""
    rng = random.Random(seed)
    even = paths[:4]
    urls: Any = rng.choice([even, "::".join(even), paths[0].replace("s-00", "s-{00..03}"), even[:1], even * 2, paths])
    settings = {"shardshuffle": False, "handler": rng.choice(["reraise_exception", "ignore_and_continue"])}
    calls = stages(rng)
    names = [name for name, _, _ in calls]
    said = f"pipeline {seed}: {settings} {calls}"
    wanted, error = run(build(theirs, urls, settings, calls))
    data = build(ours, urls, settings, calls)
    found, own_error = run(data)
    if any(name == "shuffle" and arguments[0] > 1 for name, arguments, _ in calls):
        blind = {"slice", "batched", "listed", "compose", "with_epoch", "repeat", "map", "map_dict", "select"}
        if not blind & set(names) and error is None:
            assert sorted(map(str, found)) == sorted(map(str, wanted)), said
        return "random"
    assert (found, own_error) == (wanted, error), f"{said}\n{_difference(found, wanted)}\n{own_error} for {error}"
    if error is not None or data.inexact() is not None or data.open() is None or "mcached" in names:
        return "equal"
    cut = rng.randint(0, len(wanted))
    data = build(ours, urls, settings, calls)
    values = iter(data)
    head = [plain(next(values)) for _ in range(cut)]
    state = json.loads(json.dumps(data.state_dict()))
    data = build(ours, urls, settings, calls)
    data.load_state_dict(state)
    rest = run(data)[0] if state["epoch"] == 0 else []
    assert head + rest[: MOST - cut] == wanted, f"{said}\nafter {cut} values, at {state}"
    return "state"


def _difference(found: list[Any], wanted: list[Any]) -> str:
    for number, (one, other) in enumerate(itertools.zip_longest(found, wanted)):
        if one != other:
            return f"value {number} is {str(one)[:300]}\ninstead of {str(other)[:300]}"
    return "values are equal"


def compare(seeds: range, folder: Path) -> dict[str, int]:
    """Compare many pipelines, and return how many there were of each kind; an AssertionError names one that differs."""
    import webdataset

    import dataload.compat.webdataset as facade

    paths, kinds = write_archives(folder), dict.fromkeys(("equal", "random", "state"), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            kinds[check(seed, webdataset, facade, paths)] += 1
        gc.collect()  # the original leaves archives open
    return kinds


def main() -> int:
    """Compare pipelines; print each that differs."""
    with tempfile.TemporaryDirectory() as folder:
        kinds = lambda seed: compare(range(seed, seed + 1), Path(folder))  # noqa: E731
        return drive(__doc__, "pipelines", 500, lambda seed: max(found := kinds(seed), key=found.__getitem__))


if __name__ == "__main__":
    sys.exit(main())
