import numpy as np
import pytest

from dataload.errors import CorruptFileError
from dataload.sources.tar import index as tar_index
from dataload.sources.tar.header import Member
from dataload.sources.tar.index import build_head, build_line, parse_index

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


EXPECTED = (["train/000", "train/001"], ["jpg", "cls"] * 2, [512, 1536, 2560, 7168], [480, 4, 4097, 10])


def test_words():
    for version in ("v1.1", "v1.2"):
        without_names = parse("jpg 512 480 cls 1536 4", "jpg 2560 4097 cls 7168 10", head=f"{version} 2")
        assert contents(without_names) == (None, *EXPECTED[1:])
    assert contents(parse("a\x01 512 7 b\x02.a\x01"))[:2] == (["b\x02"], ["a\x01"])
    names = "a.b.c", "d.v1/a.b", "d.v1/long.b", "README", "żółć.b", ".b"
    keys = contents(parse(*(f"b 512 1 {name}" for name in names)))[0]
    assert keys == ["a", "d.v1/a", "d.v1/long", "README", "żółć", ""]


@pytest.mark.parametrize("stretch", [8, 60, 64, 130])
def test_stretches_end_at_lines(monkeypatch, stretch):
    monkeypatch.setattr(tar_index, "_BLOCK_BYTES", stretch)
    assert contents(parse(*LINES)) == EXPECTED
    lines = [f"jpg {512 * (2 * i + 1)} {i} {i}.jpg" for i in range(300)]
    found = [str(i) for i in range(300)], ["jpg"] * 300, [512 * (2 * i + 1) for i in range(300)], list(range(300))
    assert contents(parse(*lines)) == found
    with pytest.raises(CorruptFileError, match=r"x.idx: line 201: 'y' is a size that is not a number"):
        parse(*lines[:199], "jpg 512 y a.jpg", *lines[200:])
    with pytest.raises(CorruptFileError, match="line 302: the index ends here, after 300 of 301 samples"):
        parse(*lines, head="v1.2 301")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("\n", new) for new in ("\r\n", "  \n", "\n ")),
        *((" ", new) for new in ("\t", "   ", "\v\f")),
        *(("v1.2 2", new) for new in ("v1.2 2 more words", "v1.2 2.5", "v1.2 +2")),
        *(("END", new) for new in ("", "\n\n", "\nnot looked at\n")),
    ],
)
def test_what_else_dali_reads(old, new):
    text = "\n".join(["v1.2 2", *LINES]) + "END"
    assert contents(parse_index(text.replace(old, new).replace("END", "\n").encode(), "x")) == EXPECTED


def test_samples_that_differ_and_many_extensions():
    long = "x" * 31, "x" * 32, "x" * 33, "x" * 40, "x" * 8, "x" * 9, "x" * 7
    names = [f"e{i}" for i in range(100)] + [*long, *long]
    lines = [" ".join(f"{e} {512 * i} {i} a{i}.{e}" for e in names[: 1 + i % len(names)]) for i in range(1, 300)]
    found = parse(*lines)
    assert found.ends is not None
    codes = [found.extensions[found.code(c)] for c in range(len(found.blocks))]
    assert codes == [e for i in range(1, 300) for e in names[: 1 + i % len(names)]]


@pytest.mark.parametrize("digits", range(1, 19))
def test_numbers_of_any_length(digits):
    number = int("9" * digits)
    offset = 10 ** (digits - 1) // 512 * 512
    assert contents(parse(f"a {offset} {number} b.a", "a 512 7 c.a"))[2:] == ([offset, 512], [number, 7])


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


def test_lines():
    assert build_head(12) == b"v1.2 12\n"
    assert build_line([Member(b"d/a.seg.png", 512, 7), Member(b"d/README", 1536, 0)]) == (
        b"seg.png 512 7 d/a.seg.png d/README 1536 0 d/README\n"
    )
