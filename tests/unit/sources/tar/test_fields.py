import io
import json

import numpy as np
import pytest
from made_files import npy

from dataload.codecs.decoders import known_extension
from dataload.errors import ConfigError
from dataload.sources.tar.fields import encode_field, name_fields


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
        assert found == extension
        assert np.load(io.BytesIO(data))["a"].tolist() == [0, 1, 2]


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
