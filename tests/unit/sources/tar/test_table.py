import io
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from cores import CORES, check_allocations, compiled
from hypothesis import given
from hypothesis import strategies as st
from made_files import npy

import dataload
from dataload.codecs.decoders import known_extension
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.tar.header import Member
from dataload.sources.tar.reader import TarSource
from dataload.sources.tar.samples import group_members, name_fields
from dataload.sources.tar.table import parse_index
from dataload.sources.tar.writer import encode_field
from dataload.storage.core import core
from dataload.storage.local.files import versions_of


@pytest.mark.parametrize(
    ("extensions", "options", "names"),
    [
        ("jpg seg.png JPG", {"shorten": False}, {"jpg": (0,), "seg.png": (1,), "JPG": (2,)}),
        ("jpg seg.png JPG", {"shorten": False, "case_sensitive": False}, {"jpg": (0, 2), "seg.png": (1,)}),
        ("image.npy label.cls cls npy a.b.txt x.raw seg.JPG", {}, "image label cls npy a.b x.raw seg"),
        ("x.npy x", {}, "x.npy x"),
        ("x.npy x.txt", {}, "x.npy x.txt"),
        (".npy", {}, ".npy"),
        ("a.cls.npy a.cls a", {}, {"a.cls.npy": (0,), "a.cls": (1,), "a": (2,)}),
        ("a.cls.npy a", {}, {"a.cls": (0,), "a": (1,)}),
        ("x.jpg y x.png x", {"meet": False}, {"x": (0, 2, 3), "y": (1,)}),
    ],
)
def test_names_of_extensions(extensions, options, names):
    settings = {"shorten": True, "case_sensitive": True, "meet": True, **options}
    known = known_extension if settings.pop("shorten") else lambda name: None
    meet = settings.pop("meet")
    found = name_fields(extensions.split(), known=known, meet=lambda codes: meet, **settings)
    assert found == (names if isinstance(names, dict) else {name: (n,) for n, name in enumerate(names.split())})


@pytest.mark.parametrize(
    ("name", "value", "extension", "data"),
    [
        ("x", np.arange(3), "x.npy", npy(np.arange(3))),
        ("x", np.float32(2), "x.npy", npy(np.float32(2))),
        ("npy", np.arange(3), "npy", npy(np.arange(3))),
        ("jpg", np.arange(3), "jpg.npy", npy(np.arange(3))),
        ("label", 7, "label.cls", b"7"),
        ("cls", -7, "cls", b"-7"),
        ("x.cls2", 7, "x.cls2", b"7"),
        ("json", 7, "json", b"7"),
        ("txt", 7, "txt.cls", b"7"),
        ("x", 0.1, "x.json", b"0.1"),
        ("x", float("inf"), "x.json", b"Infinity"),
        ("cls", 0.5, "cls.json", b"0.5"),
        ("x", True, "x.json", b"true"),
        ("x", {"a": [1]}, "x.json", b'{"a": [1]}'),
        ("x.json", [1, "é"], "x.json", json.dumps([1, "é"]).encode()),
        ("x", "é", "x.txt", "é".encode()),
        ("caption.txt", "é", "caption.txt", "é".encode()),
        ("cls", "7", "cls.txt", b"7"),
        ("jpg", b"\xff\xd8", "jpg", b"\xff\xd8"),
        ("x", bytearray(b"ab"), "x", b"ab"),
        ("x.npy", memoryview(b"ab"), "x.npy", b"ab"),
    ],
)
def test_values_and_their_files(name, value, extension, data):
    assert encode_field(name, value) == (extension, data)


def test_arrays_by_name_are_an_npz():
    for name, extension in (("x", "x.npz"), ("npz", "npz")):
        found, data = encode_field(name, {"a": np.arange(3)})
        assert (found, np.load(io.BytesIO(data))["a"].tolist()) == (extension, [0, 1, 2])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "field 'x' is of type NoneType, which tar archives do not store"),
        ({1, 2}, "is of type set, which tar archives do not store"),
        ([{1}], "field 'x' cannot be stored as json: Object of type set"),
        (np.array([None]), "field 'x' cannot be stored as npy: Object arrays cannot be saved"),
        ("\ud800", "field 'x' cannot be stored as txt: .*surrogates"),
    ],
)
def test_what_cannot_be_stored(value, message):
    with pytest.raises(ConfigError, match=message):
        encode_field("x", value)


def test_hidden_files_and_directories_are_no_components():
    names = (b"d/a.x", b".x", b"d/.x", b"d/", b"README", b"d/README", b"a.")
    found = group_members(Member(name, 512, 0) for name in names)
    assert found.keys.names(np.arange(len(found))) == ["d/a", "README", "d/README", "a"]
    assert found.extensions == ("x", "README", "d/README", "")


def test_offsets_beyond_four_billion_blocks():
    found = group_members([Member(b"a.x", 2**45, 2**33)])
    assert found.offsets(slice(None)).tolist() == [2**45]
    assert found.lengths(slice(None)).tolist() == [2**33]


LINES = ("jpg 512 480 train/000.jpg cls 1536 4 train/000.cls", "jpg 2560 4097 train/001.jpg cls 7168 10 train/001.cls")


def parse(*lines: str, head: str | None = None):
    return parse_index("\n".join([head or f"v1.2 {len(lines)}", *lines, ""]).encode(), "x.idx")


def contents(table):
    codes = [table.code(c) for c in range(len(table.blocks))]
    return (
        table.keys and table.keys.names(np.arange(len(table))),
        [table.extensions[code] for code in codes],
        table.offsets(slice(None)).tolist(),
        table.lengths(slice(None)).tolist(),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"line 1: expected 'v1.1' or 'v1.2' and the number of samples, found b''"),
        *((head, "line 1: expected") for head in ("\n", "V1.2 2\n", "v1.2 many\n", "\ufeffv1.2 2\n")),
        *((f"{head}\n", f"line 1: expected .* found b'{head}'") for head in ("v2.0 2", "v1.2")),
        ("v1.2 0\n", "line 1: the number of samples is 0, expected 1 or more"),
        *((f"v1.2 {count}\n", f"line 1: the number of samples is {count}") for count in ("-3", "9" * 30)),
        ("v1.2 1\n", "line 2: the index ends here, after 0 of 1 samples"),
        ("v1.2 2\na 512 1 b.a\n", "line 3: the index ends here, after 1 of 2 samples"),
        ("v1.2 2\na 512 1 b.a\n\na 512 1 b.a\n", "line 3: an empty line, expected a sample"),
        ("v1.2 1\na 512 1 b.a c\n", "line 2: 5 words, expected 4 for each component"),
        ("v1.1 1\na 512 1 b.a\n", "line 2: 4 words, expected 3 for each component"),
        *((f"v1.2 1\na 512 {x} b.a\n", f"line 2: '{x}' is a size that is not a number") for x in ("1x", "-1")),
        ("v1.2 1\na 0x200 1 b.a\n", "line 2: '0x200' is an offset that is not a number"),
        ("v1.2 1\na 512 1 b.a b 1024 \u0661 b.b\n", "line 2: '\u0661' is a size that is not a number"),
        ("v1.2 1\na 513 1 b.a\n", "line 2: '513' is not the offset of a file: offsets are multiples of 512"),
        (f"v1.2 1\na {2**63} 1 b.a\n", f"line 2: '{2**63}' is an offset larger than any file"),
        (f"v1.2 1\na 512 {'1' * 100} b.a\n", "line 2: '1{40}' is a size larger than any file"),
    ],
)
def test_what_does_not_parse(text, message):
    with pytest.raises(CorruptFileError, match=f"^x.idx: {message}.*; rebuild the index: dataload index TAR$"):
        parse_index(text.encode(), "x.idx")


WORDS = st.sampled_from(
    ["a", "a.b", "512", "1024", "513", "0", "-1", "9" * 18, "9" * 19, "d.e/f.a", ".a", "\x01", "ż", ""]
)
PLAIN = st.tuples(
    st.sampled_from(["jpg", "cls"]), st.sampled_from(["512", "1024"]), st.just("7"), st.sampled_from(["a", "ab.c"])
)
COMPONENTS = (
    PLAIN
    | st.tuples(WORDS, WORDS, WORDS, WORDS)
    | st.builds(lambda ext, offset, name: (ext, str(512 * offset), "7", name), WORDS, st.integers(0, 2**40), WORDS)
)


@given(st.lists(st.lists(COMPONENTS, max_size=3), max_size=4), st.integers(1, 4), st.sampled_from([" ", "\t", "  "]))
def test_the_core_parses_as_python_does(lines, samples, space):
    words = [space.join(word for component in line for word in component) for line in lines]

    def outcome():
        try:
            table = parse(*words, head=f"v1.2 {samples}")
        except CorruptFileError as error:
            return str(error)
        arrays = table.codes, table.blocks, table.sizes, table.ends, table.keys and table.keys.ends
        return contents(table), [each is not None and (each.dtype, each.tolist()) for each in arrays]

    found = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core(), "tar_lines", lambda *_: None)
        assert outcome() == found


def written_archives(folder, count):
    """Paths of archives and indexes, each ended by a zero byte but the last, and the versions."""
    paths = [folder / f"{number}.tar" for number in range(count)]
    for number, path in enumerate(paths):
        with dataload.create(path) as writer:
            writer.extend(
                {"__key__": f"d/{row}", "x": b"a" * row, **({"y": b""} if number % 2 else {})} for row in range(20)
            )
    names = [os.fsencode("\0".join(map(str, each))) for each in (paths, [path.with_suffix(".idx") for path in paths])]
    return paths, (*names, versions_of([*map(str, paths)]), True)


@compiled
def test_each_failing_allocation_is_a_memory_error(tmp_path):
    check_allocations(CORES[1].tar_lines, ("\n".join(LINES).encode(), 0, 2, 4), 8)
    check_allocations(CORES[1].tar_open, written_archives(tmp_path, 2)[1], 10)


@compiled
def test_archives_are_opened_in_one_call(tmp_path):
    paths, arguments = written_archives(tmp_path, 5)
    paths[1].write_bytes(b"changed")
    paths[3].with_suffix(".idx").unlink()
    found = CORES[1].tar_open(*arguments)
    assert [each is None for each in found] == [False, True, False, True, False]
    status = os.stat(paths[2])
    assert found[2] == (
        status.st_dev,
        status.st_ino,
        CORES[1].tar_lines(paths[2].with_suffix(".idx").read_bytes(), 8, 20, 4),
    )
    assert CORES[0].tar_open(*arguments) == [None] * 5
    for wrong in ((arguments[1] + b"\0", arguments[2]), (arguments[1], arguments[2][1:])):
        with pytest.raises(ValueError, match=r"5 archives, other indexes or 1[25] numbers"):
            CORES[1].tar_open(arguments[0], *wrong, True)


@compiled
@given(st.booleans(), st.integers(0, 10**6), st.integers(0, 255))
def test_a_changed_byte_is_found_as_python_finds_it(in_index, place, byte):
    def outcome():
        try:
            with TarSource(path) as source:
                return source.read(range(len(source)))
        except CorruptFileError as error:
            return str(error)

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (path,), _ = written_archives(Path(folder), 1)
        file = path.with_suffix(".idx") if in_index else path
        data = bytearray(file.read_bytes())
        data[place % len(data)] = byte
        file.write_bytes(data)
        found = outcome()
        patch.setattr(core(), "tar_open", CORES[0].tar_open)
        assert outcome() == found


@compiled
@pytest.mark.parametrize("end", range(len(LINES[0]) + 1))
def test_the_core_reads_no_further_than_the_text(end):
    text = LINES[0][:end].encode()
    assert CORES[1].tar_lines(text, 0, 2, 4) is None
    with pytest.raises(ValueError, match="at least one sample"):
        CORES[1].tar_lines(text, end + 1, 1, 4)
