import lmdb
import numpy as np
import pytest
from format_suite import FormatSuite
from wire import field, varint

from dataload.sources.lmdb.torchrecord import TorchRecordSource
from dataload.testing import SourceTraits

# Name of the dtype -> its number in the schema, the field that holds the values, how they are packed.
TENSORS = {
    "float32": (1, 3, "fixed"),
    "int32": (2, 4, "varint"),
    "bool": (5, 4, "varint"),
    "uint8": (6, 4, "varint"),
    "int8": (7, 4, "varint"),
    "uint16": (8, 4, "varint"),
    "int16": (9, 4, "varint"),
    "int64": (10, 10, "varint"),
    "float16": (12, 4, "bits"),
    "float64": (13, 9, "fixed"),
}


def tensor(name, value):
    named = field(7, name.encode())
    if isinstance(value, bytes):
        return varint(2 << 3) + varint(3) + field(5, value) + named
    if isinstance(value, str):
        return varint(2 << 3) + varint(4) + field(6, value.encode()) + named
    kind, number, packing = TENSORS[value.dtype.name]
    if packing == "fixed":
        data = value.tobytes()
    else:
        integers = value.view(np.uint16) if packing == "bits" else value
        data = b"".join(varint(int(integer)) for integer in integers.ravel())
    dims = b"".join(varint(1 << 3) + varint(extent) for extent in value.shape)
    return dims + varint(2 << 3) + varint(kind) + (field(number, data) if data else b"") + named


def write(path, records, parts):
    """The layout of the original: db0, db1, ..., keys padded to the digits of the number of records in each."""
    with lmdb.open(str(path), map_size=1 << 26, max_dbs=parts, lock=False) as environment:
        cuts = [len(records) * part // parts for part in range(parts + 1)]
        for part in range(parts):
            database = environment.open_db(f"db{part}".encode())
            mine = records[cuts[part] : cuts[part + 1]]
            with environment.begin(write=True, db=database) as txn:
                for number, record in enumerate(mine):
                    message = b"".join(field(1, tensor(name, value)) for name, value in record.items())
                    txn.put(str(number).zfill(len(str(len(mine)))).encode(), message)


class TestTorchRecord(FormatSuite):
    traits = SourceTraits(
        several_paths=True,
        value_types=(np.ndarray, bytes, str),
        dtypes=tuple(TENSORS),
        corruptions=("last_page_missing",),
    )

    def write(self, path, records):
        write(path, records, 1)

    source = TorchRecordSource

    def corrupt(self, path, kind):
        file = path / "data.mdb"
        file.write_bytes(file.read_bytes()[:-4096])


@pytest.mark.slow_suite  # as `TestLMDBUnmapped`, with this codec
class TestTorchRecordUnmapped(TestTorchRecord):
    source, options = TorchRecordSource, {"map": False}


@pytest.mark.slow_suite
class TestTorchRecordInParts(FormatSuite):
    """Three sub-databases, whose keys differ in width."""

    traits = SourceTraits(value_types=(np.ndarray,))

    def write(self, path, records):
        write(path, records, 3)

    source = TorchRecordSource
