"""Syrah under hypothesis: what the original would read of our files, and files with bytes changed."""

import bson
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataload.errors import CorruptFileError
from dataload.sources.syrah.layout import DTYPES, parse_metadata
from dataload.sources.syrah.writer import SyrahWriter
from dataload.testing.cases import SourceTraits
from dataload.testing.strategies import records_for

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
TABLES = st.lists(st.integers(22, 24), max_size=3).map(lambda numbers: np.array(numbers, "<i8").tobytes())
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
        if len(lengths) != 1 or any(isinstance(entry.get("shape"), dict) for entry in document.values()):
            return
    try:
        document = bson.decode(bytes(changed))
        columns = parse_metadata(bytes(changed), 1 << 20, 1 << 30, "x.syr")
    except (bson.errors.InvalidBSON, CorruptFileError):
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
