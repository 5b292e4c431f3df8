import io

import lmdb
import numpy as np
import pytest
from format_suite import FormatSuite

from dataload.sources.lmdb.reader import LMDBSource
from dataload.testing import SourceTraits


def write_values(path, values, **options):
    """By the lmdb package, in keys that are not padded: LMDB's own order is 0, 1, 10, 11, 2, ..."""
    with (
        lmdb.open(str(path), map_size=1 << 26, lock=False, **options) as environment,
        environment.begin(write=True) as txn,
    ):
        for index, value in enumerate(values):
            txn.put(str(index).encode(), value)


class TestLMDB(FormatSuite):
    processes_together = False
    traits = SourceTraits(record_type=bytes, several_paths=True, corruptions=("last_page_missing", "no_meta_page"))

    def write(self, path, records):
        write_values(path, records)

    source = LMDBSource

    def corrupt(self, path, kind):
        file = path / "data.mdb"
        data = file.read_bytes()
        file.write_bytes(data[:-4096] if kind == "last_page_missing" else bytes(8192) + data[8192:])


@pytest.mark.slow_suite
class TestLMDBUnmapped(TestLMDB):
    processes_together = True
    source, options = LMDBSource, {"map": False}


@pytest.mark.slow_suite
class TestLMDBInOneFile(FormatSuite):
    traits = SourceTraits(record_type=bytes, several_paths=True, suffix=".mdb")

    def write(self, path, records):
        write_values(path, records, subdir=False)

    source = LMDBSource


@pytest.mark.slow_suite
class TestLMDBWithCodec(FormatSuite):
    """Values are archives by `numpy.savez`."""

    traits = SourceTraits(several_paths=True, value_types=(np.ndarray,))

    def write(self, path, records):
        write_values(path, [_savez(record) for record in records])

    source, options = LMDBSource, {"codec": "npz"}


def _savez(record):
    stream = io.BytesIO()
    np.savez(stream, **record)
    return stream.getvalue()
