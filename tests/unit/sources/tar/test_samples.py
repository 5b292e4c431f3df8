import numpy as np
import pytest

from dataload.sources.tar.header import Member
from dataload.sources.tar.samples import group_members, split_name


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (b"a.jpg", (b"a", b"jpg")),
        (b"d/a.seg.png", (b"d/a", b"seg.png")),
        (b"d.v1/a.png", (b"d.v1/a", b"png")),
        (b"./a.png", (b"./a", b"png")),
        (b"README", (b"README", b"README")),
        (b"d/Makefile", (b"d/Makefile", b"d/Makefile")),
        (b"a.", (b"a", b"")),
        (b".hidden", None),
        (b"d/.hidden.txt", None),
        (b"d/", None),
        (b"", None),
    ],
)
def test_key_and_extension(name, parts):
    assert split_name(name) == parts


def table(*names: str):
    return group_members(Member(name.encode(), 512 + 1024 * i, i) for i, name in enumerate(names))


def names(of, *samples: int) -> list[str]:
    return of.keys.names(np.array(samples))


def test_samples_alike_are_a_table():
    found = table("00.jpg", "00.cls", "01.jpg", "01.cls", "02.jpg", "02.cls")
    assert (len(found), found.extensions, found.codes.tolist(), found.ends) == (3, ("jpg", "cls"), [0, 1], None)
    assert found.offsets(slice(2, 4)).tolist() == [512 + 2048, 512 + 3072]
    assert found.lengths(np.array([5])).tolist() == [5]
    assert (found.first([1]), found.first([0]), found.first([]), found.first([1, 0])) == (1, 0, -1, 0)
    assert [found.sample(c) for c in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [found.code(c) for c in range(6)] == [0, 1] * 3
    assert names(found, 2, 0) == ["02", "00"]
    assert found.start(2) == 4


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


def test_no_samples_and_keys_beyond_ascii():
    found = table()
    assert (len(found), found.extensions, held(found), found.first([])) == (0, (), 0, -1)
    found = group_members([Member("żółć.jpg".encode(), 512, 1), Member(b"\xff.jpg", 1536, 1)])
    assert names(found, 1, 0) == ["\udcff", "żółć"]


def held(table) -> int:
    arrays = (table.codes, table.ends, table.blocks, table.sizes, table.keys.ends)
    return sum(array.nbytes for array in arrays if array is not None) + len(table.keys.text)


def test_bytes_a_component():
    found = table(*(f"{i:06d}.{name}" for i in range(20_000) for name in ("jpg", "cls")))
    assert held(found) / 40_000 <= 11.1
    ragged = table(*(f"{i:06d}.{name}" for i in range(20_000) for name in ("jpg", "cls", "txt")[: 1 + i % 3]))
    assert held(ragged) / 40_000 <= 16


def test_offsets_beyond_four_billion_blocks():
    found = group_members([Member(b"a.x", 2**45, 2**33)])
    assert found.offsets(slice(None)).tolist() == [2**45]
    assert found.lengths(slice(None)).tolist() == [2**33]
