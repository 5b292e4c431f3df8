"""Syrah under hypothesis: what the original would read of our files, and files with bytes changed."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import bson
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataload.errors import CorruptFileError
from dataload.sources.syrah.layout import DTYPES, _InvalidMetadata, _parse_columns
from dataload.sources.syrah.reader import SyrahSource
from dataload.sources.syrah.writer import SyrahWriter
from dataload.testing.strategies import records_for
from dataload.testing.traits import SourceTraits

GOLDEN = Path(__file__).parents[1] / "golden" / "syrah"
TRAITS = SourceTraits(value_types=(np.ndarray, bytes, str), dtypes=tuple(n for n in DTYPES if n != "float128"))
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_as_described(data):
    """All that the original's reader looks at, in the simplest words: no shapes, no kinds, no checks."""
    offset, length = (int.from_bytes(data[place : place + 8], "little", signed=True) for place in (6, 14))
    document = bson.decode(data[offset : offset + length])
    count = len(next(iter(document.values()))["size"]) // 8
    records = []
    for index in range(count):
        record = {}
        for key, entry in document.items():
            start, size = (
                int.from_bytes(entry[part][8 * index : 8 * index + 8], "little") for part in ("offset", "size")
            )
            value = data[start : start + size]
            record[key] = value.decode() if entry["dtype"] == "str" else np.frombuffer(value, entry["dtype"])
        records.append(record)
    return records


def flattened(value):
    """What the original makes of a value: text stays, all else has one dimension."""
    if isinstance(value, str):
        return value
    return np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.atleast_1d(value).ravel()


@same_folder
@given(records=records_for(TRAITS))
def test_what_we_write_the_original_reads(records, tmp_path):
    path = tmp_path / "ours.syr"
    with SyrahWriter(path, overwrite=True) as writer:
        writer.extend(records)
    found = read_as_described(path.read_bytes())
    assert len(found) == len(records)
    for got, record in zip(found, records, strict=True):
        assert list(got) == list(records[0])
        for name, value in record.items():
            want = flattened(value)
            if isinstance(want, str):
                assert got[name] == want
            else:
                assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape)
                assert got[name].tobytes() == want.tobytes()


@st.composite
def damaged(draw, data):
    """A file with some bytes changed, cut out, put in or moved."""
    content = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(content) - 1)))
        action = draw(st.sampled_from(["flip", "number", "cut", "remove", "insert", "copy"]))
        if action == "flip" and content:
            content[place] ^= draw(st.integers(1, 255))
        elif action == "number":
            number = draw(st.sampled_from([0, 1, -1, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63), len(data), 22, 7]))
            content[place : place + 8] = number.to_bytes(8, "little", signed=True)
        elif action == "cut":
            del content[place:]
        elif action == "remove":
            del content[place : place + draw(st.integers(1, 16))]
        elif action == "insert":
            content[place:place] = draw(st.binary(min_size=1, max_size=16))
        else:
            start = draw(st.integers(0, max(0, len(content) - 1)))
            content[place : place + 24] = content[start : start + 24]
    return bytes(content)


def read_everything(path):
    """Every way of reading, over every record."""
    with SyrahSource(path) as source:
        indices = list(range(len(source)))
        records = source.read(indices)
        for index in indices[:3]:
            source.read_batch([index])
        assert source.fields
        assert len(records) == len(indices)
        return sum(
            value.nbytes if isinstance(value, np.ndarray) else len(value) for r in records for value in r.values()
        )


SEEDS = ["basic.syr", "varlen.syr", "strings.syr", "dtypes.syr", "key_order.syr", "keys.syr", "rejected_item.syr"]


@pytest.fixture(scope="module")
def with_shapes(tmp_path_factory):
    path = tmp_path_factory.mktemp("seed") / "shapes.syr"
    with SyrahWriter(path) as writer:
        for i in range(6):
            writer.write({"a": np.ones((2, i % 3)), "b": b"x" * i, "c": np.ones((2, 2), np.int8), "t": "é" * i})
    return path.read_bytes()


@pytest.mark.parametrize("seed", [*SEEDS, "shapes of ours"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_files_are_read_or_refused(seed, data, tmp_path, with_shapes):
    """Never another exception, a crash, a hang, or memory sized by a number that the file made up."""
    original = with_shapes if seed == "shapes of ours" else (GOLDEN / seed).read_bytes()
    path = tmp_path / "changed.syr"
    content = data.draw(damaged(original))
    path.write_bytes(content)
    total = 0
    with contextlib.suppress(CorruptFileError):
        total = read_everything(path)
    # Arrays may overlap, so a file can hold more values than bytes, but no value is larger than the file.
    assert total <= len(content) * len(original)


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=4),
        st.binary(max_size=16), st.sampled_from([
            bson.ObjectId(b"x" * 12), bson.MinKey(), bson.MaxKey(), bson.Code("f"), bson.Code("f", {"a": 1}),
            bson.Decimal128("1"), bson.Timestamp(1, 2), bson.DBRef("a", 1),
        ]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
TABLES = st.lists(st.integers(0, 2), max_size=3).map(lambda numbers: np.array(numbers, "<i8").tobytes())
ENTRIES = st.fixed_dictionaries(
    {"size": TABLES, "dtype": st.sampled_from(["uint8", "str"]), "offset": TABLES},
    optional={
        "more": VALUES,
        "kind": VALUES | st.just("bytes"),
        "shape": VALUES | st.fixed_dictionaries({"ndim": TABLES, "dims": TABLES, "of": VALUES}),
    },
)


@settings(max_examples=2 * settings().max_examples)
@given(document=st.dictionaries(st.text(st.characters(exclude_characters="\0"), max_size=3), ENTRIES), data=st.data())
def test_metadata_are_those_of_pymongo(document, data):
    """Of valid documents, and of those with a few bytes changed that both take."""
    changed = bytearray(bson.encode(document))
    for _ in range(count := data.draw(st.integers(0, 2))):
        changed[data.draw(st.integers(4, len(changed) - 1))] = data.draw(st.integers(0, 255))
    if not count:
        lengths = {len(entry[part]) for entry in document.values() for part in ("offset", "size")}
        shapes = [entry["shape"] for entry in document.values() if isinstance(entry.get("shape"), dict)]
        if len(lengths) != 1 or not all({"ndim", "dims"} <= shape.keys() for shape in shapes):
            return
    try:
        document = bson.decode(bytes(changed))
        columns = _parse_columns(bytes(changed))
    except (bson.errors.InvalidBSON, _InvalidMetadata):
        assert count, "a valid document is refused"
        return
    assert [column.name for column in columns] == list(document)
    for column, entry in zip(columns, document.values(), strict=True):
        assert column.offsets.tobytes() == bytes(entry["offset"])
        assert column.sizes.tobytes() == bytes(entry["size"])
        assert column.dtype == entry["dtype"]
        assert column.is_bytes == (entry.get("kind") == "bytes" and column.dtype == "uint8")
        assert (column.shapes is None) == (not isinstance(entry.get("shape"), dict))
        if column.shapes is not None:
            assert column.shapes.ndim.tobytes() == bytes(entry["shape"]["ndim"])


@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.syr"
    for head in (b"", b"GS", b"GS\0\0\2\0" + (22).to_bytes(8, "little") + max(0, len(content)).to_bytes(8, "little")):
        path.write_bytes(head + content)
        with pytest.raises(CorruptFileError):
            read_everything(path)


def test_a_document_that_promises_much_takes_no_memory(tmp_path):
    """A table of a gibibyte in a file of a kilobyte."""
    path = tmp_path / "promise.syr"
    document = bytearray(bson.encode({"x": {"offset": bytes(800), "size": bytes(800), "dtype": "uint8"}}))
    place = document.index(b"\x05offset\0") + 8
    document[place : place + 4] = (2**30).to_bytes(4, "little")
    path.write_bytes(b"GS\0\0\2\0" + (22).to_bytes(8, "little") + len(document).to_bytes(8, "little") + document)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptFileError, match="not a BSON document"):
        len(SyrahSource(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
