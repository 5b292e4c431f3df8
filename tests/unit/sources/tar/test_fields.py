import io
import json

import numpy as np
import pytest
from made_files import npy

from dataload.codecs.decoders import known_extension
from dataload.errors import ConfigError
from dataload.sources.tar.fields import encode_field, name_fields
from dataload.sources.tar.header import Member
from dataload.sources.tar.index import build_head, build_line, parse_index
from dataload.sources.tar.samples import group_members


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
        (None, "field 'x': a NoneType cannot be stored in a tar archive"),
        ({1, 2}, "a set cannot be stored"),
        ([{1}], "field 'x' cannot be stored as json: Object of type set"),
        (np.array([None]), "field 'x' cannot be stored as npy: Object arrays cannot be saved"),
        ("\ud800", "field 'x' cannot be stored as txt: .*surrogates"),
    ],
)
def test_what_cannot_be_stored(value, message):
    with pytest.raises(ConfigError, match=message):
        encode_field("x", value)


def table(*names: str):
    return group_members(Member(name.encode(), 512 + 1024 * i, i) for i, name in enumerate(names))


def names(of, *samples: int) -> list[str]:
    return of.keys.names(np.array(samples))


def test_samples_that_differ():
    found = table("a.jpg", "a.cls", "b.cls", "cc.txt", "cc.jpg", "cc.jpg")
    assert found.ends.tolist() == [2, 3, 6]
    assert found.first([0]).tolist() == [0, -1, 4]
    assert found.first([1]).tolist() == [1, 2, -1]
    assert found.first([2, 0]).tolist() == [0, -1, 3]
    assert [found.sample(c) for c in range(6)] == [0, 0, 1, 2, 2, 2]
    assert [found.code(c) for c in range(6)] == [0, 1, 1, 2, 0, 0]
    assert names(found, 2, 0, 1, 2) == ["cc", "a", "b", "cc"]
    components, rows = found.all_components(np.array([2, 0, 2]))
    assert components.tolist() == [3, 4, 5, 0, 1, 3, 4, 5]
    assert rows.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert [found.start(sample) for sample in range(3)] == [0, 2, 3]


def test_samples_alike_and_no_samples():
    found = table("00.jpg", "00.cls", "01.jpg", "01.cls")
    assert (found.extensions, found.codes.tolist(), found.ends, found.start(1)) == (("jpg", "cls"), [0, 1], None, 2)
    assert (found.first([1]), found.first([0]), found.first([]), found.first([1, 0])) == (1, 0, -1, 0)
    assert ([found.sample(c) for c in range(4)], [found.code(c) for c in range(4)]) == ([0, 0, 1, 1], [0, 1, 0, 1])
    found = table()
    assert (len(found), found.extensions, held(found), found.first([])) == (0, (), 0, -1)


def test_keys_beyond_ascii():
    found = group_members([Member("żółć.jpg".encode(), 512, 1), Member(b"\xff.jpg", 1536, 1)])
    assert names(found, 1, 0) == ["\udcff", "żółć"]


def held(table) -> int:
    arrays = (table.codes, table.ends, table.blocks, table.sizes, table.keys.ends)
    return sum(array.nbytes for array in arrays if array is not None) + len(table.keys.text)


def test_bytes_a_component():
    found = table(*(f"{i:06d}.{name}" for i in range(20_000) for name in ("jpg", "cls")))
    assert held(found) / 40_000 <= 11.1
    samples = [[Member(b"%06d.%b" % (i, name), 512 * i, 99) for name in (b"jpg", b"cls")] for i in range(5000)]
    assert held(parse_index(build_head(5000) + b"".join(map(build_line, samples)), "x")) / 10_000 <= 11.1
    ragged = table(*(f"{i:06d}.{name}" for i in range(20_000) for name in ("jpg", "cls", "txt")[: 1 + i % 3]))
    assert held(ragged) / 40_000 <= 16


def test_offsets_beyond_four_billion_blocks():
    found = group_members([Member(b"a.x", 2**45, 2**33)])
    assert found.offsets(slice(None)).tolist() == [2**45]
    assert found.lengths(slice(None)).tolist() == [2**33]
