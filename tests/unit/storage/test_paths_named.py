"""Names that files hold."""

import pytest

from dataload.errors import CorruptFileError
from dataload.storage import named_files
from dataload.storage.paths import leads_elsewhere

INSIDE = [
    *("a.tar", "a/b/c.tar", "-a", ".hidden", "~/a", "{0..3}.tar", "*.tar", "a[0:4].tar", "a (1).tar", "é/ü.tar"),
    *("run:1.tar", "2024-01-01T00:00.tar", "..a", "a..", "...", "a\udcff"),
]
ELSEWHERE = [
    *("", ".", "..", "/", "/a", "//host/a", "a/", "a//b", "./a", "a/./b", "a/..", "../a", "a/../../b", "\\a", "..\\a"),
    *("\\\\host\\a", "C:\\a", "c:a", "C:/a", "file:a", "file:/a", "FILE:///a", "http://h/a", "https://u:p@h/a?b"),
    *("s3://b/a", "gs:a", "az:a", "memory://a", "memory:a", "tfds:a", "hf://a", "pipe:cat a", "a+b:/c", "%2e%2e/a"),
    *("..%2fa", "%2fa", "a%00", "a%5cb", "a\0", "a\nb", "\t..", "a\x7f", "a\ud800", "a b" * 5000, None, 3, ["a"], b"a"),
]


@pytest.mark.parametrize("name", INSIDE)
def test_names_inside(name):
    """They are neither patterns nor expanded."""
    assert leads_elsewhere(name) == ""
    assert named_files("d/x.json", [name]) == [f"d/{name}"]


@pytest.mark.parametrize("name", ELSEWHERE, ids=lambda name: repr(name)[:20])
def test_names_elsewhere(name):
    assert leads_elsewhere(name).endswith("is not the name of a file below this directory")
    for file in ("d/x.json", "s3://bucket/d/x.json"):
        with pytest.raises(CorruptFileError, match=r"d/x\.json: it must not name this file: ") as caught:
            named_files(file, ["good", name])
        assert "u:p" not in str(caught.value)
        assert str(caught.value).endswith("To open files elsewhere, list their paths")


def test_names_at_urls():
    for name in ("a?b", "a?b/../c", "a\udcff"):
        with pytest.raises(CorruptFileError, match="is not the name of a file below"):
            named_files("https://host/d/x.json", [name])
    assert named_files("https://host/d/x.json", ["a#b", "c%20d"]) == ["https://host/d/a#b", "https://host/d/c%20d"]
    assert named_files("https://host/d/x.json", ["a"], "https://host") == ["https://host/a"]
