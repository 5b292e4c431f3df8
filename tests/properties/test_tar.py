"""Archives and indexes of any content, whole and damaged, against plain models."""

import io
import tarfile
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dataload.codecs.decoders import known_extension
from dataload.codecs.npz import parse_npy
from dataload.collate import default_collate
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.tar.header import END, Member, build_header, padded, scan
from dataload.sources.tar.reader import TarSource
from dataload.sources.tar.samples import group_members, split_name
from dataload.sources.tar.table import build_head, build_line, parse_index
from dataload.sources.tar.writer import TarWriter, write_index


@pytest.fixture(scope="module")
def directory():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def scanned(data: bytes) -> list[tuple[bytes, int, int]]:
    return [tuple(m) for m in scan(lambda offset, length: data[offset : offset + length], len(data), "x.tar")]


letters = st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=["Cs"])
parts = st.text(letters, min_size=1, max_size=120).filter(lambda part: len(part.encode()) <= 200)
names = st.lists(parts, min_size=1, max_size=3).map("/".join)


@given(names, st.integers(0, 600))
def test_headers_of_any_name_are_read_by_us_and_by_python(name, size):
    data = build_header(name.encode(), size) + bytes(padded(size)) + END
    assert [(found[0], found[2]) for found in scanned(data)] == [(name.encode(), size)]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        (info,) = tar.getmembers()
    # Python takes trailing slashes for those of directories.
    assert (info.name, info.size) == (name.rstrip("/"), size)


kinds = st.sampled_from(
    [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CONTTYPE, tarfile.FIFOTYPE]
)
entries = st.lists(st.tuples(names, kinds, st.binary(max_size=1200), st.floats(0, 1e9)), max_size=6)
layouts = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def pack(files, layout) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=layout) as tar:
        for name, kind, data, time in files:
            info = tarfile.TarInfo(name)
            info.type, info.mtime, info.linkname = kind, time, "target"
            info.size = len(data) if kind in (tarfile.REGTYPE, tarfile.CONTTYPE) else 0
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


@given(entries, layouts)
def test_scanner_finds_what_python_finds(files, layout):
    try:
        data = pack(files, layout)
    except ValueError:  # names that USTAR cannot hold
        assume(False)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(i.name.encode("utf-8", "surrogateescape"), i.offset_data, i.size) for i in tar if i.isreg()]
    assert [(name.rstrip(b"/"), offset, size) for name, offset, size in scanned(data)] == expected


small = st.text("ab.", min_size=1, max_size=5)
member_names = st.lists(small | st.tuples(st.sampled_from("xy"), small).map("/".join), max_size=20)


def plain_samples(members: list[Member]) -> list[tuple[bytes, list[tuple[bytes, int, int]]]]:
    """The slow, obvious way."""
    samples = []
    for name, offset, size in members:
        directory, slash, base = name.rpartition(b"/")
        if not base or base.startswith(b"."):
            continue
        stem, dot, extension = base.partition(b".")
        key = directory + slash + stem
        component = extension if dot else name, offset, size
        if samples and samples[-1][0] == key:
            samples[-1][1].append(component)
        else:
            samples.append((key, [component]))
    return samples


def table_samples(table):
    if table.ends is None:
        width = len(table.codes)
        spans = [range(i * width, (i + 1) * width) for i in range(len(table))]
    else:
        spans = [range(table.start(i), int(table.ends[i])) for i in range(len(table))]
    offsets, sizes = table.offsets(slice(None)).tolist(), table.lengths(slice(None)).tolist()
    keys = table.keys.names(np.arange(len(table)))
    return [
        (
            key.encode("utf-8", "surrogateescape"),
            [(table.extensions[table.code(c)].encode(), offsets[c], sizes[c]) for c in span],
        )
        for key, span in zip(keys, spans, strict=True)
    ]


@given(member_names, st.integers(0, 2**40))
def test_grouping_is_that_of_the_plain_model(files, size):
    members = [Member(name.encode(), 512 * (i + 1), size + i) for i, name in enumerate(files)]
    samples = plain_samples(members)
    assert table_samples(group_members(members)) == samples
    first = {member.offset: split_name(member.name) for member in members}
    for key, parts in samples:
        assert [first[offset] for _, offset, _ in parts] == [(key, extension) for extension, _, _ in parts]


words = st.text(
    st.characters(codec="utf-8", exclude_characters=" \t\n\v\f\r\0/.", exclude_categories=["Cs"]),
    min_size=1,
    max_size=40,
)
components = st.tuples(words | st.sampled_from(["jpg", "cls"]), st.integers(0, 2**48), st.integers(0, 10**15))
lines = st.lists(st.tuples(words, st.lists(components, min_size=1, max_size=4)), min_size=1, max_size=12)


@given(lines)
def test_an_index_says_what_it_was_made_of(samples):
    text = build_head(len(samples))
    expected = []
    for key, components in samples:
        members = [Member(f"{key}.{e}".encode(), 512 * block, size) for e, block, size in components]
        text += build_line(members)
        expected.append((key.encode(), [(e.encode(), 512 * block, size) for e, block, size in components]))
    assert table_samples(parse_index(text, "x")) == expected


FILES = [(f"{'d/' * (60 * (i // 2 % 2))}{i}.jpg", tarfile.REGTYPE, bytes([i]) * (i * 200), 0.5 * i) for i in range(8)]
WHOLE = pack(FILES, tarfile.PAX_FORMAT)


@given(st.integers(0, len(WHOLE)))
def test_an_archive_cut_anywhere(length):
    data = WHOLE[:length]
    found = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [tuple(m) for m in scan(lambda o, n: data[o : o + n], length, "x", on_damage="stop")]
    except CorruptFileError:
        assert length < 2048  # nothing before the first member's end
    assert found == scanned(WHOLE)[: len(found)]


keys = st.text("abcäß-_0123456789", min_size=1, max_size=12)
field_names = st.text("abcxyz_0", min_size=1, max_size=6).filter(lambda name: known_extension(name) is None)
arrays = hnp.arrays(
    st.sampled_from(["<f4", "<f8", ">i2", "u1", "?", "<c8", "<U3", "S2", "<M8[s]"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.text(max_size=3),
    lambda inner: st.lists(inner) | st.tuples(inner).map(list),
    max_leaves=4,
)
values = st.one_of(
    arrays,
    st.binary(max_size=700),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.dictionaries(st.text(max_size=2), json_values, max_size=2),
)
records = st.lists(st.dictionaries(field_names, values, min_size=1, max_size=4), max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records, st.booleans(), st.data())
def test_records_come_back_as_they_were_written(directory, written, index, data):
    path = directory / "round.tar"
    with TarWriter(path, overwrite=True, index=index) as writer:
        for record in written:
            writer.write(record)
    assert path.with_suffix(".idx").exists() == (index and bool(written))
    with TarSource(path, decode="auto") as source:
        assert len(source) == len(written)
        order = data.draw(st.permutations(range(len(written))))
        for number, found in zip(order, source.read(order), strict=True):
            record = written[number]
            assert found.pop("__key__") == f"{number:08d}"
            assert list(found) == list(record)
            for name, value in record.items():
                assert type(found[name]) is type(value)
                if isinstance(value, np.ndarray):
                    assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
                    np.testing.assert_array_equal(found[name], value)
                else:
                    assert found[name] == value
    if written:
        before = path.with_suffix(".idx").read_bytes() if index else None
        assert write_index(path) == len(written)
        assert before in (None, path.with_suffix(".idx").read_bytes())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(["<f4", ">i2", "u1", "<U3"]), st.booleans())
def test_columns_of_arrays_are_those_of_records(directory, data, dtype, same_shape):
    shape = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    first = data.draw(shape)
    made = [
        data.draw(hnp.arrays(dtype, first if same_shape else data.draw(shape)))
        for _ in range(data.draw(st.integers(1, 6)))
    ]
    if data.draw(st.booleans()):
        made = [np.asfortranarray(array) for array in made]
    path = directory / "columns.tar"
    with TarWriter(path, overwrite=True) as writer:
        writer.extend({"x": array} for array in made)
    rows = data.draw(st.lists(st.integers(0, len(made) - 1), min_size=1, max_size=8))
    # What each member holds, decoded by itself: the general path.
    raw = TarSource(path)
    plain = [{"x": parse_npy(raw[row]["x.npy"])} for row in rows]
    with TarSource(path, decode="auto", fields=["x"]) as source:
        for one, other in zip(source.read(rows), plain, strict=True):
            assert (one["x"].dtype, one["x"].shape) == (other["x"].dtype, other["x"].shape)
            np.testing.assert_array_equal(one["x"], other["x"])
        try:
            expected = default_collate(plain)
        except ConfigError as error:
            with pytest.raises(ConfigError) as caught:
                source.read_batch(rows)
            assert str(caught.value) == str(error)  # noqa: PT017 - both refuse
            return
        batch = source.read_batch(rows)
    assert (batch["x"].dtype, batch["x"].shape) == (expected["x"].dtype, expected["x"].shape)
    np.testing.assert_array_equal(batch["x"], expected["x"])
