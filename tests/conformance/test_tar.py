import tarfile

import numpy as np
import pytest
from format_suite import FormatSuite, flip, members
from made_files import pack

from dataload.sources.tar.reader import TarSource
from dataload.testing import SourceTraits

SHAPE = {"suffix": ".tar", "several_paths": True}


def write_archive(path, records):
    """By the standard library, one sample per record."""
    pack(path, members(records), tarfile.GNU_FORMAT)


def write_index(path):
    with tarfile.open(path) as archive:
        samples = {}
        for member in archive:
            key, _, extension = member.name.partition(".")
            samples.setdefault(key, []).append(f"{extension} {member.offset_data} {member.size} {member.name}")
    if samples:  # an index of no samples is none
        lines = [f"v1.2 {len(samples)}", *map(" ".join, samples.values()), ""]
        path.with_suffix(".idx").write_text("\n".join(lines))


class TestTar(FormatSuite):
    """Archives without an index, in bytes; the end of the file is as good an end as the blocks of zeros."""

    source, keyed = TarSource, True
    traits = SourceTraits(**SHAPE, value_types=(bytes,), notices_cuts=False, corruptions=("flip_header", "cut_member"))

    def write(self, path, records):
        write_archive(path, records)

    def corrupt(self, path, kind):
        if kind == "flip_header":
            flip(path, 0)
        else:
            path.write_bytes(path.read_bytes()[:515])


class TestTarWithIndex(TestTar):
    traits = SourceTraits(**SHAPE, value_types=(bytes,), corruptions=("other_sizes", "other_offsets", "other_text"))

    def write(self, path, records):
        write_archive(path, records)
        write_index(path)

    def corrupt(self, path, kind):
        index = path.with_suffix(".idx")
        head, first, *rest = index.read_text().splitlines()
        extension, offset, size, name = first.split()
        if kind == "other_sizes":
            size = str(int(size) + 10**6)
        elif kind == "other_offsets":
            offset = str(int(offset) + 512)
        else:
            name = "no number"
        index.write_text("\n".join([head, f"{extension} {offset} {size} {name}", *rest, ""]))


@pytest.mark.slow_suite
class TestTarDecoded(FormatSuite):
    """``decode="auto"``: arrays, text and numbers come back as what they were."""

    source, options, keyed = TarSource, {"decode": "auto"}, True
    traits = SourceTraits(**SHAPE, value_types=(np.ndarray, bytes, str, int), notices_cuts=False)

    def write(self, path, records):
        write_archive(path, records)
