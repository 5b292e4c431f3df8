"""The compiled core and its twin in numpy: equal bytes, equal refusals."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from cores import CORES, _core_c, check_allocations, compiled, each, numbers, outcome
from hypothesis import given, settings
from hypothesis import strategies as st

import dataload
from dataload.storage.core import PLACE_BITS, core, core_name

PLAIN = -1
DATA = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)


def test_it_is_compiled_where_there_is_a_compiler():
    assert core_name() == ("compiled" if hasattr(core(), "Tables") else "numpy")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert len(CORES) == 2, "run: python build_core.py"


# Without the package, whose import takes a second.
CHOICE = (
    "import sys, types; package = types.ModuleType('dataload'); package.__path__ = sys.argv[1:]; "
    "sys.modules['dataload'] = package; "
    "from dataload.storage.core import can_map, core_name; print(core_name(), can_map())"
)
MISSPELT = "ConfigError: DATALOAD_CORE is 'compild': did you mean 'compiled'?"


@pytest.mark.parametrize(
    ("wanted", "guard", "printed", "error"),
    [
        ("numpy", "1", "numpy False\n", ""),
        ("compiled", "0", "compiled False\n", ""),
        ("", "1", "compiled True\n", ""),
        ("compild", "1", "", MISSPELT),
    ],
)
def test_the_environment_chooses(wanted, guard, printed, error):
    if len(CORES) == 1 and "compiled" in printed:
        pytest.skip("the core is not compiled")
    environment = {**os.environ, "DATALOAD_CORE": wanted, "DATALOAD_SIGBUS_GUARD": guard}
    command = [sys.executable, "-c", CHOICE, *dataload.__path__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == printed
    assert error in done.stderr


def test_without_the_compiled_core_numpy_serves_unless_the_other_is_demanded(monkeypatch):
    monkeypatch.setitem(sys.modules, "dataload.storage._core_c", None)
    monkeypatch.delenv("DATALOAD_CORE", raising=False)
    assert core.__wrapped__().__name__ == "dataload.storage._core_numpy"
    monkeypatch.setenv("DATALOAD_CORE", "compiled")
    with pytest.raises(ImportError):
        core.__wrapped__()


@st.composite
def gathers(draw):
    length = draw(st.integers(0, 700) | st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 2047, 2048, 2100]))
    stride = draw(st.integers(1, 300))
    start = draw(st.integers(0, 400))
    last = (len(DATA) - start - length) // stride
    indices = draw(st.lists(st.integers(0, last), max_size=80))
    if draw(st.booleans()):
        indices.append(draw(st.sampled_from([last + 1, -1, 2**62, -(2**63), 2**63 - 1])))
    return start, stride, numbers(*indices), length


@given(gathers())
@settings(deadline=None)
def test_gather_equals_slices(arguments):
    start, stride, indices, length = arguments
    found = []
    for one in CORES:
        out = np.zeros(len(indices) * length, np.uint8)
        found.append((outcome(one.gather, out, DATA, start, stride, indices, length, PLAIN), out.tolist()))
    assert all(each == found[0] for each in found)
    result, out = found[0]
    if result is None:
        assert out == [byte for i in indices.tolist() for byte in DATA[start + i * stride :][:length].tolist()]
    else:
        assert result[0] is ValueError
        assert not 0 <= indices[-1] <= (len(DATA) - start - length) // stride


PAIRS = st.lists(st.tuples(st.integers(-2, 5002), st.integers(-1, 700)), max_size=60)
LONG_PAIRS = st.lists(st.tuples(st.integers(0, 700), st.sampled_from([1, 2048, 2111, 4300])), max_size=20)


@given(PAIRS | LONG_PAIRS)
@settings(deadline=None)
def test_ranges_equal_slices(pairs):
    offsets, lengths = (numbers(*column) for column in zip(*pairs, strict=True)) if pairs else (numbers(), numbers())
    total = int(lengths.sum())
    valid = all(o >= 0 and n >= 0 and o + n <= len(DATA) for o, n in pairs)
    for one in CORES:
        out = np.zeros(max(total, 0), np.uint8)
        gathered = outcome(one.gather_ranges, out, DATA, offsets, lengths, PLAIN)
        copied = outcome(one.copies, DATA, offsets, lengths, PLAIN)
        if valid:
            slices = [DATA[o : o + n].tobytes() for o, n in pairs]
            assert (gathered, copied, out.tobytes()) == (None, slices, b"".join(slices))
        else:
            assert gathered == copied == outcome(CORES[0].copies, DATA, offsets, lengths, PLAIN)
            assert copied[0] is ValueError


MISFITS = [
    ("gather", (bytearray(9), DATA, 0, 1, numbers(3), 8), "1 rows of 8 bytes do not fill 9 bytes"),
    ("gather", (bytearray(1), DATA, 0, 1, numbers(1, 2), 0), "2 rows of 0 bytes do not fill 1 b|stride 1, length 0"),
    (
        "gather",
        (bytearray(8), DATA, -1, 1, numbers(3), 8),
        "start -1, stride 1, length 8: expected at least 0, 1 and 0",
    ),
    ("gather", (bytearray(8), DATA, 0, 0, numbers(3), 8), "start 0, stride 0, length 8"),
    ("gather", (bytearray(8), DATA, 0, 2**62, numbers(3), 8), "row 0: a record outside the 5000 bytes"),
    ("gather_ranges", (bytearray(5), DATA, numbers(1), numbers(4)), "ranges of 4 bytes do not fill 5 bytes"),
    ("gather_ranges", (bytearray(4), DATA, numbers(1), numbers(4, 5)), "1 offsets and 2 lengths"),
    ("copies", (DATA, numbers(1), numbers(4, 5)), "1 offsets and 2 lengths"),
    ("copies", (DATA, numbers(0, 2**63 - 1), numbers(1, 2**63 - 1)), "row 1: a range outside the 5000 bytes"),
]


@each
@pytest.mark.parametrize(("function", "arguments", "message"), MISFITS)
def test_arguments_must_fit_each_other(one, function, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(one, function)(*arguments, PLAIN)


@each
def test_what_is_written_to_must_be_writable(one):
    with pytest.raises((TypeError, BufferError, ValueError)):
        one.gather(bytes(8), DATA, 0, 1, numbers(3), 8, PLAIN)


@compiled
def test_the_time_of_the_file_is_compared(tmp_path):
    one, path = _core_c, tmp_path / "data"
    path.write_bytes(bytes(100))
    os.utime(path, ns=(0, -1_500_000_001))  # before 1970
    with path.open("rb") as stream:
        number, data = stream.fileno(), bytes(100)
        for changed, size in ((-1_500_000_001, None), (-1_500_000_000, 100), (0, 100)):
            file = (number, changed)
            for function, arguments in (
                (one.gather, (bytearray(8), data, 0, 1, numbers(3), 8, file)),
                (one.gather_ranges, (bytearray(4), data, numbers(0), numbers(4), file)),
                (one.copies, (data, numbers(0), numbers(4), file)),
                (one.hash_ranges, (bytearray(8), data, numbers(0), numbers(4), bytes(32), file)),
            ):
                if size is None:
                    function(*arguments)
                    continue
                with pytest.raises(one.MapFault) as caught:
                    function(*arguments)
                assert str(caught.value) == str(size)


@compiled
class TestCompiled:
    @pytest.mark.parametrize(
        ("name", "right"),
        [
            ("gather", [bytearray(8), DATA, 0, 1, numbers(1), 8, PLAIN]),
            ("gather_ranges", [bytearray(4), DATA, numbers(0), numbers(4), PLAIN]),
            ("copies", [DATA, numbers(0), numbers(4), PLAIN]),
            ("hash_ranges", [bytearray(8), DATA, numbers(0), numbers(4), bytes(32), PLAIN]),
        ],
    )
    def test_wrong_arguments_are_type_errors(self, name, right):
        function = getattr(_core_c, name)
        function(*right)
        with pytest.raises(TypeError, match=f"takes {len(right)} arguments, got 1"):
            function(DATA)
        for place in range(len(right)):
            with pytest.raises(TypeError):
                function(*right[:place], object(), *right[place + 1 :])
        for file in (None, (3,), (2**40, 0), (3, None)):
            with pytest.raises((TypeError, OverflowError)):
                function(*right[:-1], file)

    def test_numbers_must_be_of_64_bits(self):
        with pytest.raises(ValueError, match="expected int64 numbers, got 3 bytes"):
            _core_c.copies(DATA, b"abc", numbers(1), PLAIN)
        with pytest.raises(OverflowError):
            _core_c.gather(bytearray(8), DATA, 0, 1, numbers(1), 2**70, PLAIN)

    def test_arguments_may_be_unaligned(self):
        indices = np.frombuffer(b"x" + numbers(5, 0, 4992).tobytes(), np.uint8)[1:]
        out = np.zeros(24, np.uint8)
        _core_c.gather(out, DATA, 0, 1, indices, 8, PLAIN)
        assert out.tobytes() == b"".join(DATA[i : i + 8].tobytes() for i in (5, 0, 4992))

    def test_numbers_that_another_thread_changes_do_no_harm(self):
        indices, stop = np.zeros(100_000, np.int64), threading.Event()

        def change():
            while not stop.is_set():
                indices[:] = 2**60
                indices[:] = 0

        thread = threading.Thread(target=change)
        thread.start()
        try:
            out = np.empty((len(indices), 64), np.uint8)
            for _ in range(200):
                outcome(_core_c.gather, out, DATA, 0, 1, indices, 64, PLAIN)
        finally:
            stop.set()
            thread.join()

    def test_each_failing_allocation_is_a_memory_error(self):
        offsets, lengths = numbers(*range(64)), numbers(*[1000] * 64)
        out = np.empty(64_000, np.uint8)
        calls = [
            (_core_c.gather, (out, DATA, 0, 1, offsets, 1000, PLAIN), 1),
            (_core_c.gather_ranges, (out, DATA, offsets, lengths, PLAIN), 2),
            (_core_c.copies, (DATA, offsets, lengths, PLAIN), 3 + 1 + 64),
            (_core_c.hash_ranges, (out[:512], DATA, offsets, lengths, bytes(32), PLAIN), 2),
        ]
        for call in calls:
            check_allocations(*call, more=20)


def test_without_a_compiler_the_build_goes_on():
    root = Path(__file__).parents[3]
    before = sorted(path.name for path in (root / "dataload/storage").glob("*.so"))
    done = subprocess.run(
        [sys.executable, root / "build_core.py"], env={**os.environ, "CC": "false"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("dataload's core was not compiled, so reading will be slower: ")
    assert sorted(path.name for path in (root / "dataload/storage").glob("*.so")) == before


@each
def test_memory_of_several_shards(one):
    maps, first, second = one.Maps(3), np.arange(100, dtype=np.uint8), np.arange(8, dtype=np.int64)
    maps.put_memory(0, first)
    maps.put_memory(2, second)
    out, places = np.zeros(12, np.uint8), numbers(4, (2 << PLACE_BITS) + 16, 90)
    maps.gather(out, places, 4)
    assert out.tolist() == [4, 5, 6, 7, 2, 0, 0, 0, 90, 91, 92, 93]
    maps.gather_ranges(out, places, numbers(1, 8, 3))
    assert out.tolist() == [4, 2, 0, 0, 0, 0, 0, 0, 0, 90, 91, 92]
    fields = numbers(0, 2), numbers(1, 2), numbers(0, 3)
    assert maps.cut(out, places, 4, *fields, None, None) == -1
    assert out[:9].tolist() == [4, 2, 90, 6, 7, 0, 0, 92, 93]
    for place, length, error in ((97, 4, ValueError), (1 << PLACE_BITS, 4, LookupError), (0, -1, ValueError)):
        with pytest.raises(error):
            maps.gather_ranges(np.zeros(4, np.uint8), numbers(place), numbers(length))
    maps.drop(0)
    with pytest.raises(LookupError):
        maps.gather(out[:4], numbers(0), 4)
    with pytest.raises(ValueError, match="shard 3 of 3"):
        maps.put_memory(3, first)
    maps.put_memory(1, np.empty((2, 0)))
    maps.gather(out[:0], numbers(1 << PLACE_BITS), 0)
