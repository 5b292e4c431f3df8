"""States and fingerprints as earlier code has written them: they must stay readable, wherever its modules lie by now.

A case that is missing from states.json is added by ``python tests/golden/test_states.py``. What is there is never
written anew: it would then say nothing of earlier code. To change a case on purpose, take its line out first.
"""

import binascii
import functools
import hashlib
import itertools
import json
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from command_line import run
from resumable import Resumable

import dataload
from dataload.compat import webdataset
from dataload.compat.grain import RangeDataSource, tfds_data_source
from dataload.samplers import BatchPlanner, BucketBatchSampler, Mixture, PackedBatchSampler, PoolShuffle, Weighted
from dataload.samplers.basic import GlobalShuffle, Lanes, Repeat, Sequential, ShardSequential, Subset
from dataload.streams import MultiStreamLoader, RowMixture, StreamSampler
from dataload.types import BytesColumn

HERE = Path(__file__).parent
GOLDEN = HERE / "states" / "states.json"
TOKENS = HERE / "states" / "tokens.npy"
BATCHES = 3
"""How many batches behind a state are compared."""


class OwnCodec:
    """One with a name; nothing else of it is in a fingerprint."""

    name = "own codec"

    def decode(self, data):
        return {"size": len(data)}

    def encode(self, record):
        raise NotImplementedError


class ShownCodec(OwnCodec):
    """One with a repr, which is in the fingerprint."""

    def __repr__(self):
        return "ShownCodec(of 1)"


class Squares:
    """A source without a fingerprint: its class and its length stand for it."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return {"square": index**2}


class Named(Squares):
    """A source with a fingerprint of its own."""

    def fingerprint(self):
        return "0123456789abcdef"


def syrah(name, **options):
    return lambda: dataload.open(HERE / "syrah" / f"{name}.syr", **options)


def lmdb(name, **options):
    return lambda: dataload.open(HERE / "torchrecord" / name, format="lmdb", **options)


def torchrecord(name, **options):
    return lambda: dataload.open(HERE / "torchrecord" / name, **options)


def tar(*names, **options):
    return lambda: dataload.open([HERE / "tar" / "tars" / f"{name}.tar" for name in names], **options)


def array_record(*names, **options):
    return lambda: dataload.open([f"{HERE}/arrayrecord/{name}" for name in names], format="array_record", **options)


def tfds(split, **options):
    return lambda: tfds_data_source(HERE / "tfds" / "demo" / "1.0.0", split, **options)


def tokens(**options):
    return lambda: dataload.open(TOKENS, format="tokens", **options)


def memory(**options):
    columns = {"x": np.arange(60, dtype=np.float32).reshape(20, 3), "name": [f"number {i}" for i in range(20)]}
    return lambda: dataload.MemorySource(columns, **options)


def records():
    return dataload.MemorySource([{"i": i, "text": f"{i:03}", "data": bytes([i])} for i in range(12)])


def two():
    return dataload.sources.ConcatSource([dataload.RangeSource(30), dataload.RangeSource(50)])


SHARDS = [f"shards-0000{i}-of-00003.array_record" for i in range(3)]
EXAMPLES = "../tfds/demo/1.0.0/demo-train.array_record-00000-of-00002"
KNOWN = {"fields": ["cls", "json"]}

SOURCES: dict[str, Callable[[], Any]] = {
    "syrah": syrah("basic"),
    "syrah, many": syrah("thousand"),
    "syrah, lengths differ": syrah("varlen", fields=["tokens"]),
    "syrah, text": syrah("strings"),
    "syrah, fields": syrah("basic", fields=["features", "label"]),
    "syrah, shapes": syrah("basic", shapes={"features": (4, -1), "label": ()}),
    "torchrecord": torchrecord("db1_20", fields=["1"]),
    "torchrecord, four sub-databases": torchrecord("db4_39", fields=["1"]),
    "torchrecord, db_num": torchrecord("tensors_db2", db_num=2),
    "lmdb, padded keys": lmdb("plain_padded"),
    "lmdb, keys as numbers": lmdb("plain_ascii_int"),
    "lmdb, file": lmdb("plain_single_file.lmdb"),
    "lmdb, two": lambda: dataload.open([HERE / "torchrecord" / f"plain_{name}" for name in ("padded", "ascii_int")]),
    "lmdb, raw": lmdb("plain_padded", codec="raw"),
    "lmdb, tensorprotos": lmdb("tensors", subdatabase="db0", codec="tensorprotos"),
    "lmdb, tensorprotos, fields": lmdb("db1_20", subdatabase="db0", codec="tensorprotos", fields=["1"]),
    "lmdb, example": lmdb("plain_padded", codec="example"),
    "lmdb, msgpack": lmdb("plain_padded", codec="msgpack"),
    "lmdb, npz": lmdb("plain_padded", codec="npz"),
    "lmdb, function": lmdb("plain_padded", codec=binascii.hexlify),
    "lmdb, object": lmdb("plain_padded", codec=OwnCodec()),
    "lmdb, object with a repr": lmdb("plain_padded", codec=ShownCodec()),
    "tar": tar("plain_ustar"),
    "tar, empty shard": tar("shards/part0", "shards/part_empty", "shards/part1", "shards/part2"),
    "tar, one field": tar("plain_ustar", fields=["__key__", "cls"]),
    "tar, auto": tar("pax_plain", decode="auto", **KNOWN),
    "tar, cls": tar("pax_plain", decode={"cls": "cls"}),
    "tar, two decoders": tar("pax_plain", decode={"cls": "cls", "json": "json"}),
    "tar, two decoders, other order": tar("pax_plain", decode={"json": "json", "cls": "cls"}),
    "tar, function": tar("pax_plain", decode={"cls": int, "json": json.loads}),
    "tar, empty": tar("missing", missing="empty", **KNOWN),
    "tar, skip": tar("missing", missing="skip", **KNOWN),
    "tar, skip, decoded": tar("missing", missing="skip", decode={"cls": "cls", "json": "json"}, **KNOWN),
    "tar, lower case": tar("upper", case_sensitive=False),
    "tar, lower case, all options": tar(
        "upper", case_sensitive=False, decode={"cls": "txt"}, missing="skip", on_damage="stop", fields=["CLS"]
    ),
    "tar, stop at damage": tar("plain_ustar", on_damage="stop"),
    "tar, index": tar("plain_ustar", index=HERE / "tar" / "idx" / "plain_ustar.idx"),
    "array_record": array_record("default.array_record"),
    "array_record, uncompressed": array_record("uncompressed.array_record"),
    "array_record, shards": array_record(*SHARDS),
    "array_record, reader_options": array_record("uncompressed.array_record", reader_options=""),
    "array_record, selection": array_record("default.array_record[2:4]"),
    "array_record, selections": array_record("default.array_record[2:9]", "uncompressed.array_record[0:5]"),
    "array_record, example": array_record(EXAMPLES, codec="example", fields=["id", "text", "label"]),
    "array_record, function": array_record("default.array_record", codec=binascii.hexlify),
    "array_record, object": array_record("default.array_record[1:20]", codec=OwnCodec()),
    "array_record, npz": array_record("default.array_record", codec="npz"),
    "array_record, msgpack": array_record("default.array_record", codec="msgpack"),
    "array_record, tensorprotos": array_record("default.array_record", codec="tensorprotos"),
    "tfds": tfds("train"),
    "tfds, fields": tfds("train[1:]+test", fields=["id", "matrix", "text", "vector"]),
    "tfds, inner features": tfds("test", fields=["nested", "packed", "image"]),
    "tokens": tokens(window=8),
    "tokens, stride": tokens(window=8, stride=3, field="ids", dtype="int32"),
    "tokens, drop": tokens(window=8, end_token=0, ends="drop"),
    "tokens, pad": tokens(window=8, end_token=0, ends="pad", pad_token=1),
    "tokens, documents": tokens(window=8, documents=[0, 40, 41, 200], ends="drop"),
    "memory": memory(),
    "memory, fields": memory(fields=["name"]),
    "memory, records": records,
    "range": lambda: dataload.open("range:80"),
    "range, steps": lambda: dataload.RangeSource(60, start=5, step=2),
    "concat": two,
    "concat of files": lambda: dataload.sources.ConcatSource([syrah("basic", fields=["label"])(), syrah("one_item")()]),
    "slice": lambda: dataload.open("range:80")[3:70:2],
    "slice of a slice": lambda: syrah("thousand")()[10:900][::-3],
    "slice of concat": lambda: two()[20:60],
}


@functools.cache
def made_files():
    return tempfile.TemporaryDirectory()


def made(name, **options):
    """Write one file, or a folder or archive of several, always with the same bytes."""

    def make():
        path, rows = Path(made_files().name, name), [{"i": i, "text": f"{i:03}"} for i in range(12)]
        if path.suffix in (".jsonl", ".txt"):
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            return dataload.open(path, **options)
        for i in range(4):
            file, pixels = f"{'ab'[i % 2]}/{i}.ppm", b"P6 1 1 255\n" + bytes([i] * 3)
            if path.suffix == ".zip":
                with zipfile.ZipFile(path, "a" if i else "w") as archive:
                    archive.writestr(zipfile.ZipInfo(file), pixels)
            else:
                (path / file).parent.mkdir(parents=True, exist_ok=True)
                (path / file).write_bytes(pixels)
        return dataload.open(path, **options)

    return make


def golden_file(name, **options):
    return lambda: dataload.open(HERE / name, **options)


LATER = {
    "tfrecord": golden_file("tfrecord/bytes.tfrecord"),
    "tfrecord, example": golden_file("tfrecord/examples.tfrecord-00000-of-00002", codec="example", format="tfrecord"),
    "mds": golden_file("mds/all"),
    "mds, compressed": golden_file("mds/gz"),
    "wids": golden_file("wids/shards.json"),
    "hugging face": golden_file("hugging_face/saved"),
    "hugging face, dict": golden_file("hugging_face/dict/train"),
    "arrow": golden_file("hugging_face/saved/data-00000-of-00002.arrow"),
    "parquet": golden_file("lerobot/h264/data/chunk-000/file-000.parquet"),
    "lerobot": golden_file("lerobot/images"),
    "video": golden_file("lerobot/h264/videos/observation.images.top", cache=False),
    "jsonl": made("x.jsonl"),
    "text": made("x.txt", format="text"),
    "folder": made("x"),
    "zip": made("x.zip"),
    "windows": lambda: dataload.windows(dataload.RangeSource(30), [10, 20], 4),
    "mix": lambda: dataload.mix({"a": dataload.RangeSource(30), "b": dataload.RangeSource(50)}, {"a": 0.5, "b": 0.5}),
}
"""Formats and views of later versions, of which only the fingerprints are kept."""

WEIGHTS = [0.5, 0, 3, 1e-3, 7, 1 / 3, *range(74)]
PACK = dataload.Pack(positions="positions")  # as the field was called when the batches were written
LENGTHS = [7 * i % 23 for i in range(80)]
SEQUENCES = (12, 7, 0, 21, 1, 22, 17)


def loader(source, **settings):
    """A function that builds a loader of a source, with other settings if it is given some."""

    def make(**others):
        batches = {} if isinstance(settings.get("sampler"), BatchPlanner) else {"batch_size": 4}
        return dataload.Loader(SOURCES[source](), **{**batches, **settings, **others})

    return make


def ordered(sampler, **settings):
    return loader("range", sampler=sampler, **settings)


def stream(mode="split", **settings):
    return StreamSampler(**{"sequence_lengths": SEQUENCES, "rows": 4, "chunk": 3, "mode": mode, "seed": 5, **settings})


def of_own_source(source, **settings):
    return lambda: dataload.Loader(source, batch_size=4, **settings)


def packed(**settings):
    source = SOURCES["syrah, lengths differ"]()
    lengths = [len(record["tokens"]) for record in source]
    order = PackedBatchSampler(
        sampler=GlobalShuffle(len(lengths), 4),
        lengths=lengths,
        row_length=max(lengths),
        batch_size=2,
        window=6,
        **settings,
    )
    return dataload.Loader(source, sampler=order, collate=PACK)


def pipeline():
    """As users of WebDataset have it."""
    archives = str(HERE / "tar" / "tars" / "order" / "t{0..5}.tar")
    data = webdataset.WebDataset(archives, shardshuffle=6, seed=3)
    return data.shuffle(5).slice(1, 20).repeat(2).to_tuple("num").batched(4)


def letters(text):
    return Resumable([{"code": ord(letter)} for letter in text])


class Lists(list):
    """Sequences with a fingerprint of their own."""

    def fingerprint(self):
        return "fedcba9876543210"


NUMBERS = [list(range(100 * i, 100 * i + length)) for i, length in enumerate(SEQUENCES)]
TEXTS = ["a quick fox", "over", "the lazy dog", "and back", "again and again"]


def streams(make_stream=iter, sequences=NUMBERS, **settings):
    return lambda: MultiStreamLoader(make_stream, sequences, **{"batch_size": 3, "num_workers": 0, **settings})


class Case(NamedTuple):
    """A saved loader.

    Attributes:
        make: Builds it.
        after: Batches that were received before the state was taken.
        slow: Steps that had not come by then, with ``in_order=False``.
        then: Settings that are others where the state is loaded.
    """

    make: Callable[..., Any]
    after: int = 2
    slow: tuple[int, ...] = ()
    then: Mapping[str, Any] = MappingProxyType({})


PARTS = (GlobalShuffle(30, 1), ShardSequential((20, 30), 2))
UNDECODED = {"lmdb, example", "lmdb, msgpack", "lmdb, npz", "tfds"} | {
    f"array_record, {codec}" for codec in ("msgpack", "npz", "tensorprotos")
}
"""Only their fingerprints are kept: records are no such thing, or a JPEG, whose pixels depend on the decoder."""

CASES = {
    **{
        f"source: {name}": Case(loader(name, shuffle=True, seed=i, batch_size=2, collate=list), 1)
        for i, name in enumerate(SOURCES)
        if name not in UNDECODED
    },
    "source: own": Case(of_own_source(Squares(), shuffle=True)),
    "source: own, with a fingerprint": Case(of_own_source(Named(), shuffle=True)),
    "source: list": Case(of_own_source([{"i": i} for i in range(20)], shuffle=True)),
    "source: as Grain has it": Case(of_own_source(RangeDataSource(3, 60, 2), shuffle=True)),
    "start": Case(loader("syrah", shuffle=True, seed=3), 0),
    "middle": Case(loader("syrah", shuffle=True, seed=3), 2),
    "last step": Case(loader("syrah", shuffle=True, seed=3), 5),
    "end of an epoch": Case(loader("syrah", shuffle=True, seed=3), 6),
    "second epoch": Case(loader("syrah", shuffle=True, seed=3), 9),
    "in order": Case(loader("syrah"), 2),
    "partial tail": Case(loader("range", batch_size=17), 5),
    "dropped tail": Case(loader("range", batch_size=17, tail="drop"), 4),
    "padded tail": Case(loader("range", batch_size=17, tail="pad"), 3),
    "shuffle, global": Case(loader("tar, empty shard", fields=["num"], shuffle="global", seed=2**70)),
    "shuffle, shards": Case(loader("tar, empty shard", fields=["num"], shuffle="shards", seed=-1)),
    "shuffle, shards of a syrah file": Case(loader("syrah, many", fields=["i"], shuffle="shards", seed=1), 60),
    "rank 0 of 2": Case(loader("range", shuffle=True, rank=0, world_size=2), 3),
    "rank 1 of 2": Case(loader("range", shuffle=True, rank=1, world_size=2), 3),
    "rank 1 of 2, second epoch": Case(loader("range", batch_size=7, shuffle=True, rank=1, world_size=2), 7),
    "one rank, then two": Case(loader("range", shuffle=True), 3, then={"rank": 1, "world_size": 2}),
    "two ranks, then one": Case(
        loader("range", shuffle=True, rank=1, world_size=2), 3, then={"rank": 0, "world_size": 1}
    ),
    "another batch size": Case(loader("range", shuffle=True, seed=5), 3, then={"batch_size": 7}),
    "streams, then two ranks": Case(ordered(stream()), 3, then={"rank": 0, "world_size": 2}),
    "out of order, nothing missing": Case(loader("range", in_order=False, seed=4, shuffle=True)),
    "out of order, a step missing": Case(loader("range", in_order=False), 3, (1,)),
    "out of order, steps missing": Case(loader("range", in_order=False, shuffle=True, seed=6), 3, (1, 3)),
    "out of order, the first missing": Case(loader("range", in_order=False, rank=0, world_size=2), 2, (0,)),
    "sampler: sequential": Case(ordered(Sequential(80))),
    "sampler: global": Case(ordered(GlobalShuffle(80, 1))),
    "sampler: global of global": Case(ordered(GlobalShuffle(80, 5, parent=GlobalShuffle(80, 6)))),
    "sampler: shards": Case(ordered(ShardSequential((30, 7, 0, 43), 3))),
    "sampler: pool": Case(ordered(PoolShuffle(ShardSequential((30, 7, 0, 43), 3), 10, 2))),
    "sampler: lanes": Case(ordered(Lanes(GlobalShuffle(79, 1), 4))),
    "sampler: lanes with pools": Case(ordered(Lanes(Sequential(79), 4, 8, 9), rank=1, world_size=2)),
    "sampler: subset by slice": Case(ordered(Subset(GlobalShuffle(80, 3), slice(70, 3, -3)))),
    "sampler: subset by range": Case(ordered(Subset(GlobalShuffle(80, 3), range(4, 70, 2)))),
    "sampler: subset by positions": Case(ordered(Subset(GlobalShuffle(80, 3), [5, 5, -1, 0, 77, *range(20)]))),
    "sampler: global of subset": Case(ordered(GlobalShuffle(40, 3, parent=Subset(Sequential(80), slice(40, None))))),
    "sampler: repeat": Case(ordered(Repeat(GlobalShuffle(17, 8), 5)), 5),
    "sampler: weighted": Case(ordered(Weighted(WEIGHTS, 1000, 6)), 30),
    "sampler: weighted urn": Case(ordered(Weighted(np.array(WEIGHTS), 60, 6, replacement=False))),
    "sampler: mixture": Case(loader("concat", sampler=Mixture(PARTS, (0.5, 0.3), "first", 7))),
    "sampler: mixture, longest": Case(
        loader("concat", sampler=Mixture(PARTS, (1, 2), "longest", 7, window=30, lengths=(30, 50)))
    ),
    "sampler: mixture, never": Case(loader("concat", sampler=Mixture(PARTS, (1.4142135, 1), "never", 8)), 50),
    "sampler: mixture, weights by epoch": Case(
        loader("concat", sampler=Mixture(PARTS, ((1, 9), (1, 1), (1, 0)), "first", 9)), 20
    ),
    "sampler: mixture, weights by position": Case(
        loader("concat", sampler=Mixture(PARTS, {0: (1, 9), 11: (1, 1)}, "first", 9)), 2
    ),
    "batches: buckets": Case(ordered(BucketBatchSampler(lengths=LENGTHS, batch_size=4, seed=2))),
    "batches: buckets by tokens": Case(
        ordered(BucketBatchSampler(lengths=np.array(LENGTHS), max_tokens=60, boundaries=(5, 11, 23), seed=2, group=2))
    ),
    "batches: buckets in order": Case(ordered(BucketBatchSampler(lengths=LENGTHS, batch_size=4, shuffle=False)), 40),
    "batches: packed": Case(packed, 1),
    "batches: packed, cut off": Case(
        loader(
            "tokens",
            collate=PACK,
            sampler=PackedBatchSampler(
                sampler=Sequential(20), lengths=[8] * 20, row_length=20, batch_size=2, window=5, overlong="truncate"
            ),
        )
    ),
    "batches: packed, best fit": Case(lambda: packed(strategy="best-fit"), 1),
    **{f"streams: {mode}": Case(ordered(stream(mode))) for mode in ("split", "pack", "independent", "shuffled")},
    **{f"streams: {ends}": Case(ordered(stream(ends=ends))) for ends in ("pad", "drop")},
    "streams: random start": Case(ordered(stream(random_start=True)), 8),
    "streams: random start, drop": Case(ordered(stream("pack", ends="drop", random_start=True)), 8),
    "streams: epochs of 5": Case(ordered(stream("independent", epoch_steps=5)), 7),
    "streams: shuffled, epochs of 5": Case(ordered(stream("shuffled", epoch_steps=5)), 5),
    "streams: rank 1 of 2": Case(ordered(stream(), rank=1, world_size=2)),
    "streams: of an array": Case(ordered(stream(sequence_lengths=np.array(SEQUENCES), chunk=1)), 0),
    "streams: mixture": Case(
        ordered(RowMixture(parts=(stream(), stream("shuffled", rows=2), stream("independent", rows=2)))), 3
    ),
    "as WebDataset has it": Case(lambda: pipeline().loader()),
    "multistream: independent": Case(streams(mode="independent", seed=1), 9),
    "multistream: independent, not shuffled": Case(streams(mode="independent", shuffle=False), 9),
    "multistream: split": Case(streams(mode="split", seed=2), 5),
    "multistream: split, not shuffled": Case(streams(mode="split", shuffle=False), 5),
    "multistream: start": Case(streams(mode="split"), 0),
    "multistream: end of an epoch": Case(streams(mode="split", sequences=[[1, 2], [3, 4], [5, 6]]), 2),
    "multistream: second epoch": Case(streams(mode="split", sequences=[[1, 2], [3, 4], [5, 6]]), 3),
    "multistream: chunks": Case(streams(mode="split", chunk=4, ends="pad"), 2),
    "multistream: dropped": Case(streams(chunk=4, ends="drop"), 2),
    "multistream: rank 1 of 2": Case(streams(rank=1, world_size=2, batch_size=2), 4),
    "multistream: own state": Case(streams(letters, TEXTS), 6),
    "multistream: own state, split": Case(streams(letters, TEXTS, mode="split", shuffle=False), 6),
    "multistream: own fingerprint": Case(streams(sequences=Lists(NUMBERS)), 3),
}

# As the loaders before commit 14c4112 wrote them, which had neither `missing` nor `step_size`; and the case of today
# that stands where they stood.
VERSION_1 = {
    "middle": {
        "epoch": 0,
        "position": 8,
        "length": 24,
        "source": "1d9aa0420ca1a7ade6f305eaa084a159",
        "order": "fb3d1b82ea04320c26eef6cda585456e",
        "order_version": 1,
        "version": 1,
    },
    "in order": {
        "epoch": 0,
        "position": 8,
        "length": 24,
        "source": "1d9aa0420ca1a7ade6f305eaa084a159",
        "order": "6f20ae3d89b8bfa62c5d31b453c15712",
        "order_version": 1,
        "version": 1,
    },
}


def digest_of(batches):
    """Names, dtypes, shapes and values, and no name of a class."""
    found = hashlib.blake2b(digest_size=16)
    _add(found, list(batches))
    return found.hexdigest()


def _add(found, value):
    if isinstance(value, Mapping):
        found.update(f"{{{len(value)}".encode())
        for name, inner in value.items():
            _add(found, name)
            _add(found, inner)
    elif isinstance(value, (list, tuple, BytesColumn)) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        found.update(f"[{len(value)}".encode())
        for inner in value:
            _add(found, inner)
    elif isinstance(value, (np.ndarray, np.generic)):
        found.update(f"array {value.dtype.str} {value.shape}".encode())
        found.update(value.tobytes())
    elif isinstance(value, bytes):
        found.update(f"bytes {len(value)} ".encode() + value)
    else:
        assert isinstance(value, (str, bool, int, float, type(None))), type(value)
        found.update(f"{value!r} ".encode())


def receive(loader, count):
    """The next batches, also those of later epochs."""
    return list(itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), count))


def save(case):
    """The state of a case, by the code of today."""
    if case.slow:
        return save_unordered(case)
    with closing(case.make()) as loader:
        receive(loader, case.after)
        return json.loads(json.dumps(loader.state_dict()))


def save_unordered(case):
    """The same while some steps are held up, each by a worker of its own."""
    with closing(case.make(in_order=True)) as loader:
        steps = receive(loader, max(case.slow) + 1)
    slow = {int(index) for step in case.slow for index in steps[step]["index"]}
    go_on = threading.Event()

    def transform(sample):
        if int(sample["index"]) in slow:
            go_on.wait(10)
        return sample

    with closing(case.make(transform=transform, num_workers=len(case.slow) + 2, prefetch=1)) as loader:
        try:
            batches = iter(loader)
            for _ in range(case.after):
                next(batches)
            state = json.loads(json.dumps(loader.state_dict()))
        finally:
            go_on.set()
    assert len(state["missing"]) == len(case.slow), state
    return state


def after(case, state):
    """What comes next where `state` is loaded."""
    with closing(case.make(**case.then)) as loader:
        loader.load_state_dict(state)
        return digest_of(receive(loader, BATCHES))


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", [*SOURCES, *LATER])
def test_fingerprints(golden, name):
    with closing((SOURCES | LATER)[name]()) as source:
        assert source.fingerprint() == golden["fingerprints"][name]


@pytest.mark.parametrize("name", CASES)
def test_states(golden, name):
    kept = golden["states"][name]
    assert after(CASES[name], kept["state"]) == kept["next"]


@pytest.mark.parametrize("name", VERSION_1)
def test_states_of_version_1(golden, name):
    assert after(CASES[name], VERSION_1[name]) == golden["states"][name]["next"]


def test_a_state_of_other_data_or_another_order_is_noticed(golden):
    kept = golden["states"]["middle"]
    for name in ("source", "order"):
        with pytest.raises(dataload.StateMismatchError):
            after(CASES["middle"], {**kept["state"], name: "0" * 32})
    assert after(CASES["middle"], {**kept["state"], "position": 12}) != kept["next"]


def test_what_is_kept_is_what_is_tested(golden):
    assert set(golden["fingerprints"]) == set(SOURCES | LATER)
    assert set(golden["states"]) == set(CASES)


def write():
    """Add what is missing to states.json, take out what is no case any more, and leave the rest alone."""
    GOLDEN.parent.mkdir(exist_ok=True)
    if not TOKENS.exists():
        np.save(TOKENS, (np.arange(300) * 7919 % 61).astype("<u2"))
    kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {"fingerprints": {}, "states": {}}
    fingerprints = {
        name: kept["fingerprints"].get(name) or make().fingerprint() for name, make in (SOURCES | LATER).items()
    }
    states = {}
    for name, case in CASES.items():
        states[name] = kept["states"].get(name)
        if states[name] is None:
            state = save(case)
            states[name] = {"state": state, "next": after(case, state)}
    sections = []
    for title, entries in (("fingerprints", fingerprints), ("states", states)):
        # a line for each, to see in a diff which changed
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        sections.append(f' "{title}": {{\n{rows}\n }}')
    GOLDEN.write_text("{\n" + ",\n".join(sections) + "\n}\n")


CONFIGS = sorted(Path(__file__).parent.glob("certificates/*.toml"))


@pytest.mark.parametrize("config", CONFIGS, ids=[config.stem for config in CONFIGS])
def test_batches_are_those_that_version_0_1_certified(config):
    result = run("certify", config, "--check", config.with_suffix(".json"))
    assert result.exit_code == 0, result.output
    assert "the same batches, bit for bit" in result.output
    assert "certified by dataload 0.1" in result.output


if __name__ == "__main__":
    write()
