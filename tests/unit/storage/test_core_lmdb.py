"""Pages of LMDB as both cores parse them, intact and mutated: equal nodes, equal refusals."""

import struct

import lmdb
import numpy as np
import pytest
from cores import CORES, check_allocations, compiled, each, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from lmdb_files import lib_versions

BRANCH, LEAF = 1, 2
SIZE = 4096


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """By size of the page header: the file, and the numbers of its branch and leaf pages."""
    found = {}
    for version, header in zip(lib_versions(), (16, 24), strict=False):
        path = tmp_path_factory.mktemp("lmdb") / "e"
        with lmdb.open(str(path), map_size=1 << 24, lock=False, sync=False, lib_version=version) as environment:
            for start in (0, 200):  # in two transactions, so that there are free pages too
                with environment.begin(write=True) as txn:
                    for n in range(start, start + 200):
                        txn.put(b"%d" % n if n % 3 else b"key %d" % n * (n % 20 + 1), bytes(n * 37 % 4000))
        data = np.frombuffer((path / "data.mdb").read_bytes(), np.uint8)
        flags = data.reshape(-1, SIZE)[:, header - 6 : header - 4].copy().view(np.uint16).ravel()
        found[header] = data, *(np.flatnonzero(flags == kind) for kind in (BRANCH, LEAF))
    return found


def parse(one, pages, where, header, size, kind):
    out = np.full((4, len(where) * (SIZE // 10)), -7, np.int64)
    counts = np.full(len(where), -7, np.int64)
    found = one.lmdb_nodes(out, counts, pages, where, SIZE, header, size, kind)
    if found < 0:
        return found
    rows = 1 if kind == BRANCH else 4
    return found, counts.tolist(), out[:rows, :found].tolist()


def nodes_of(page, number, header, kind):
    """The nodes of one page in plain Python."""
    base = header if header == 24 else 0
    count = (struct.unpack_from("=H", page, header - 4)[0] + base - header) // 2
    for at in struct.unpack_from(f"={count}H", page, header):
        low, high, flags, key_size = struct.unpack_from("=HHHH", page, at + base)
        if kind == BRANCH:
            yield [low | high << 16 | flags << 32]
            continue
        start = at + base + 8
        key, length = page[start : start + key_size], low | high << 16
        value = start + key_size + (key_size % 2 if header == 24 else 0)
        offset = number * SIZE + value
        if flags & 1:
            offset = struct.unpack_from("=Q", page, value)[0] * SIZE + header
        is_number = key.isdigit() and int(key) < 10**18
        yield [offset, length, int(key) if is_number else -1, key_size | flags << 16]


@each
@pytest.mark.parametrize("kind", [BRANCH, LEAF])
def test_intact_pages(one, trees, kind):
    for header, (data, *where) in trees.items():
        pages = data.reshape(-1, SIZE)[where[kind - 1]]
        found, counts, out = parse(one, pages, where[kind - 1], header, len(data), kind)
        expected = [
            [*nodes_of(page.tobytes(), n, header, kind)]
            for page, n in zip(pages, where[kind - 1].tolist(), strict=True)
        ]
        assert counts == [len(nodes) for nodes in expected]
        assert [list(node) for node in zip(*out, strict=True)] == [node for nodes in expected for node in nodes]
        assert found == sum(counts) > 1


DECIMAL = [
    *((b"0", 0), (b"007", 7), (b"9" * 18, 10**18 - 1), (b"1" + b"0" * 18, -1), (b"0" * 30 + b"12", 12)),
    *((b"12x", -1), (b"1/", -1), (b"1:", -1), (b"-1", -1), (b"\xb0", -1)),
]


@pytest.mark.parametrize(("key", "number"), DECIMAL)
@each
def test_decimal_keys(one, key, number):
    page = bytearray(SIZE)
    struct.pack_into("=HHH", page, 10, LEAF, 18, 2000)
    struct.pack_into("=H", page, 16, 2000)
    struct.pack_into("=HHHH", page, 2000, 5, 0, 0, len(key))
    page[2008 : 2008 + len(key)] = key
    expected = 1, [1], [[3 * SIZE + 2008 + len(key)], [5], [number], [len(key)]]
    assert parse(one, np.frombuffer(page, np.uint8).reshape(-1, SIZE), numbers(3), 16, 10 * SIZE, LEAF) == expected


@st.composite
def changes(draw):
    """Places in a page (those that matter more often) and what is written there."""
    place = st.integers(8, 30) | st.integers(0, SIZE - 1) | st.integers(SIZE - 600, SIZE - 1)
    word = st.integers(0, 65535) | st.sampled_from([0, 1, 2, 3, 8, 16, 24, 4095, 4096, 65535]) | st.integers(0, 4100)
    return draw(st.lists(st.tuples(st.integers(0, 5), place, word), min_size=1, max_size=4))


@given(changes=changes(), header=st.sampled_from([16, 24]), kind=st.sampled_from([BRANCH, LEAF]), nodes=st.booleans())
@settings(deadline=None, max_examples=30)
def test_mutated_pages(trees, changes, header, kind, nodes):
    if header not in trees:
        return
    data, *where = trees[header]
    chosen = where[kind - 1][:6]
    pages = data.reshape(-1, SIZE)[chosen]
    for row, place, word in changes:
        page = pages[row % len(pages)]
        if nodes:  # in the header of some node
            base = header if header == 24 else 0
            at = header + 2 * (place % 4)
            place = min(int(page[at : at + 2].view(np.uint16)[0]) + base + place % 8 // 2 * 2, SIZE - 2)
        page[place : place + 2] = np.frombuffer(struct.pack("=H", word), np.uint8)[: SIZE - place]
    found = [parse(one, pages, chosen, header, len(data), kind) for one in CORES]
    assert all(each == found[0] for each in found)
    if isinstance(found[0], int):
        assert 0 <= -found[0] // 8 < len(pages)
        assert -found[0] % 8 in range(1, 6)
    elif kind == LEAF:
        offsets, lengths = (np.array(row) for row in found[0][2][:2])
        assert ((offsets >= 2 * SIZE) & (offsets + lengths <= len(data))).all()
    else:
        assert all(2 <= child < len(data) // SIZE for child in found[0][2][0])


@pytest.fixture
def right():
    """Arguments of which the page is not a leaf."""
    page, out, counts = np.zeros((1, SIZE), np.uint8), np.zeros((4, 409), np.int64), np.zeros(1, np.int64)
    return [out, counts, page, numbers(2), SIZE, 16, 10 * SIZE, LEAF]


@each
def test_arguments_must_fit_each_other(one, right):
    assert one.lmdb_nodes(*right) == -1
    for place, value in (
        *((0, right[0][:, :408].copy()), (1, np.zeros(2, np.int64)), (2, np.zeros(SIZE - 1, np.uint8))),
        *((2, np.zeros(2 * SIZE, np.uint8)), (3, numbers(2, 3)), (4, 0), (4, 128), (4, 1 << 17), (5, 20)),
    ):
        with pytest.raises(ValueError, match="the pages and the buffers do not fit each other"):
            one.lmdb_nodes(*right[:place], value, *right[place + 1 :])
    for number in (-1, 10, 2**62):
        with pytest.raises(ValueError, match="row 0: a page outside the 40960 bytes"):
            one.lmdb_nodes(*right[:3], numbers(number), *right[4:])


@compiled
def test_wrong_arguments_are_type_errors(right):
    parse = CORES[1].lmdb_nodes
    with pytest.raises(TypeError, match="takes 8 arguments, got 7"):
        parse(*right[:7])
    wrong = [(place, object()) for place in range(8)]
    for place, value in (*wrong, *((place, bytes(right[place].nbytes)) for place in (0, 1))):  # not writable
        with pytest.raises((TypeError, BufferError)):
            parse(*right[:place], value, *right[place + 1 :])


@compiled
def test_each_failing_allocation_is_a_memory_error(right):
    check_allocations(CORES[1].lmdb_nodes, right, 1)
    assert CORES[1].lmdb_nodes(*right) == -1  # nothing is left locked
