from __future__ import annotations

import io
import json
import tarfile

import numpy as np
from format_suite import FormatSuite

from dataload.sources.tar.reader import TarSource
from dataload.testing import SourceTraits


def write_archive(path, records):
    """By the standard library, one sample per record; returns name, offset and size of each member, by sample."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for index, record in enumerate(records):
            for extension, value in record.items():
                member = tarfile.TarInfo(f"{index:06d}.{extension}")
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value))
    with tarfile.open(path) as archive:
        samples = {}
        for member in archive:
            key, _, extension = member.name.partition(".")
            samples.setdefault(key, []).append((extension, member.offset_data, member.size, member.name))
    return samples


def write_index(path, samples):
    lines = [" ".join(f"{e} {o} {s} {n}" for e, o, s, n in members) for members in samples.values()]
    if lines:  # an index of no samples is none
        path.with_suffix(".idx").write_text(f"v1.2 {len(lines)}\n" + "".join(f"{line}\n" for line in lines))


def with_keys(records):
    return [{"__key__": f"{index:06d}", **record} for index, record in enumerate(records)]


class TestTar(FormatSuite):
    """Archives without an index, in bytes."""

    traits = SourceTraits(
        suffix=".tar",
        several_paths=True,
        value_types=(bytes,),
        notices_cuts=False,  # the end of the file is as good an end as the blocks of zeros
        corruptions=("flip_header", "cut_in_a_member"),
    )

    def write(self, path, records):
        write_archive(path, records)

    def open(self, path):
        return TarSource(path)

    def expected(self, records):
        return with_keys(records)

    def corrupt(self, path, kind):
        data = bytearray(path.read_bytes())
        if kind == "flip_header":
            data[0] ^= 1
        else:
            del data[515:]
        path.write_bytes(data)


class TestTarWithIndex(TestTar):
    traits = SourceTraits(
        suffix=".tar",
        several_paths=True,
        value_types=(bytes,),
        corruptions=("other_sizes", "other_offsets", "other_text"),
    )

    def write(self, path, records):
        write_index(path, write_archive(path, records))

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


class TestTarDecoded(FormatSuite):
    """``decode="auto"``: arrays, text and numbers come back as what they were."""

    traits = SourceTraits(
        suffix=".tar", several_paths=True, value_types=(np.ndarray, bytes, str, int), notices_cuts=False
    )

    def write(self, path, records):
        write_archive(path, [dict(map(_encode, record, record.values())) for record in records])

    def open(self, path):
        return TarSource(path, decode="auto")

    def expected(self, records):
        return with_keys(records)


def _encode(name, value):
    if isinstance(value, bytes):
        return name, value
    if isinstance(value, str):
        return f"{name}.txt", value.encode()
    if isinstance(value, int):
        return f"{name}.json", json.dumps(value).encode()
    stream = io.BytesIO()
    np.save(stream, value)
    return f"{name}.npy", stream.getvalue()
