"""Fingerprints of values and functions: the same in every process, for the same content and nothing else."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field

import functions
import numpy as np
import pyarrow as pa
import pytest

from dataload._util.fingerprint import code_digest, describe, digest, fingerprint
from dataload.samplers import BucketBatchSampler, GlobalShuffle, Lanes, Subset


@dataclass(frozen=True)
class Inner:
    weights: object
    names: object = ("a",)


@dataclass(frozen=True)
class Outer:
    inner: object
    seed: int = 0
    cache: dict = field(default_factory=dict, compare=False)


class Identified:
    def __init__(self, text):
        self.text = text

    def fingerprint(self):
        return self.text


DIFFERENT = [
    *(Outer(Inner(np.arange(3))), Outer(Inner(np.arange(3)), seed=1), Outer(Inner(np.arange(4)))),
    *(Outer(Inner(np.arange(3, dtype=np.int32))), Outer(Inner(np.arange(3).reshape(3, 1)))),
    *(Outer(Inner(np.arange(3), names=names)) for names in (("b",), {"a": 1}, {"a": 2})),
    *(Outer(Identified("x")), Outer(Identified("y")), Inner(np.arange(3))),
]


def test_fingerprint_sees_every_field_at_every_depth():
    assert len({fingerprint(value) for value in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Outer(Inner(np.arange(3)), cache={"x": 1}), Outer(Inner(np.arange(3)), cache={})),
        (Inner(np.arange(6)[::2]), Inner(np.array([0, 2, 4]))),
        (Inner({"a": 1, "b": 2}), Inner({"b": 2, "a": 1})),
        (Inner({"x", "y", "z"}), Inner({"z", "y", "x"})),
        (Inner(np.array(5)), Inner(np.array(5))),
    ],
)
def test_fingerprint_sees_nothing_else(one, other):
    assert fingerprint(one) == fingerprint(other)


def test_digests_are_the_same_in_every_process_and_release():
    program = (
        "from dataload._util.fingerprint import fingerprint;"
        "print(fingerprint({'names': {'a', 'b', 'c', 'd'}, 'deep': [frozenset({'x', 'y'})], 'n': (1, 2.5)}))"
    )
    command = [sys.executable, "-c", program]
    here = fingerprint({"names": {"a", "b", "c", "d"}, "deep": [frozenset({"x", "y"})], "n": (1, 2.5)})
    done = subprocess.run(command, env={"PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here
    # It stands in saved states.
    assert digest("a", 1, ("b", None)) == "f94fcd0261326f89ef36f783d2838cb4"


class Plain:
    """An object with the default repr."""

    def __init__(self, **values):
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Shown(Plain):
    def __repr__(self):
        return f"Shown({self.__dict__})"


def function():
    pass


def opaque():
    """Builds objects whose repr shows an address, new ones in each call."""
    loop = Plain(n=1)
    loop.self = [loop]
    return {
        "no attributes": Plain(),
        "attributes": Plain(n=1, weights=np.arange(3), parts={"a": [Plain()]}),
        "other attributes": Plain(n=2, weights=np.arange(3), parts={"a": [Plain()]}),
        "other array": Plain(n=1, weights=np.arange(4), parts={"a": [Plain()]}),
        "cycle": loop,
        "slots": Slotted(1),
        "other slots": Slotted(Plain()),
        "in a repr": Shown(n=Plain()),
        "in a dataclass": Outer(Plain(n=3)),
        "function": function,
        "lambda": lambda: 0,
        "partial": functools.partial(function, 1),
        "other partial": functools.partial(function, 2),
        "lock": Plain(lock=threading.Lock()),
        "array of objects": np.array([Plain(), function], object),
        "key": {Plain(n=1): 2},
        "items": deque([Plain(n=1)]),
        "generator": np.random.default_rng(3),
        "method": Plain(n=5).__init__,
    }


def test_no_address_is_in_a_fingerprint():
    first, second = opaque(), opaque()
    for name, value in first.items():
        assert fingerprint(value) == fingerprint(second[name]), name
    assert len({fingerprint(value) for value in first.values()}) == len(first)
    for value, found in (("look at 0x1f", "'look at 0x1f'"), (b"at 0x1f", "b'at 0x1f'"), (("at 0x1f",), ["'at 0x1f'"])):
        assert fingerprint([value]) == digest([found]), "text that looks like an address counts"


def test_a_long_chain_of_objects_is_no_endless_recursion():
    chain = Plain()
    for _ in range(5000):
        chain = Plain(next=chain)
    assert fingerprint(chain) == fingerprint(Plain(next=chain.next))


def test_description_of_an_order():
    order = Lanes(Subset(GlobalShuffle(100, 3), np.arange(50)), 2)
    parts = "Lanes(parent=Subset(parent=GlobalShuffle(length=100, seed=3), selection=50 values), lanes=2, seed=0)"
    assert describe(order) == parts
    buckets = BucketBatchSampler(lengths=[5] * 20, max_tokens=10, seed=4).order
    assert "('lengths', 20 values), ('max_tokens', 10)" in describe(buckets)
    assert "('seed', 4)" in describe(buckets)
    assert describe(Inner("token")) == "Inner", "of others' objects only the name"
    assert describe({3, 4}) == "2 values"


def test_functions_differ_where_their_code_does_also_after_a_run():
    assert functions.check(40) == []

    def add(record):
        return sum(number + 1 for number in range(record))

    before = code_digest(add)
    for number in range(2000):  # Python replaces instructions of code that runs often
        add(number % 3)
    assert code_digest(add) == before


def test_what_only_helps_does_not_matter():
    class Locked(functions.Holder):
        def __init__(self, value):
            super().__init__(value)
            self.lock = threading.Lock()

    assert code_digest(Locked(1)) == code_digest(Locked(1)) != code_digest(Locked(2))
    remembers = functools.lru_cache(lambda record: record)
    before = code_digest(remembers)
    remembers(1)
    assert code_digest(remembers) == before


class Secret:
    def __reduce__(self):
        raise RuntimeError


@dataclasses.dataclass
class Model:
    weights: object


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda record: functions, "it uses the module 'functions'"),
        (lambda record, module=functions: module, "it uses the module 'functions'"),
        (Model(Secret()), "it uses an object of 'Secret'"),
        (Model(pa.array([1])), "it uses an object of 'Int64Array'"),
        (Model(open), None),
        (Model(iter(x for x in ())), "it uses an object of 'generator'"),
        (Model(np.random.default_rng(0)), "it uses an object of 'Generator'"),
        (Model(np.frompyfunc(lambda x: x, 1, 1)), "it uses an object of 'ufunc'"),
        (lambda record: undefined(record), "it uses 'undefined', which has no value yet"),  # noqa: F821
        (lambda record: eval("record"), "it runs or imports code by name"),
        (lambda record: __import__("functions"), "it runs or imports code by name"),
        (lambda record: os.environ["A"], "it uses environment variables or the command line"),
        (lambda record: sys.argv[1], "it uses environment variables or the command line"),
    ],
)
def test_what_may_change_unnoticed_is_named(function, message):
    if message is None:
        assert len(code_digest(function)) == 32
    else:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            code_digest(function)


def test_what_cannot_be_looked_at():
    nested = []
    for _ in range(10_000):
        nested = [nested]
    with pytest.raises(ValueError, match=r"^it uses an object that cannot be inspected \(RecursionError: "):
        code_digest(lambda record: nested)

    def later(record):
        return value

    with pytest.raises(ValueError, match=r"^it uses 'value', which has no value yet$"):
        code_digest(later)
    value = 1
    assert value == later(0)


def test_a_submodule_that_a_function_imports_from_its_package_counts(tmp_path, monkeypatch):
    """The package need not have imported it before, and its version says nothing, because it is not installed."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "digested").mkdir()
    (tmp_path / "digested" / "__init__.py").write_text("__version__ = '1'\n")

    def absolute(record):
        from digested import inner

        return inner.scale * record

    namespace = {"__name__": "digested.other"}
    exec("def relative(record):\n    from . import inner\n    return inner.scale * record", namespace)
    seen = set()
    for scale in (1, 2):
        (tmp_path / "digested" / "inner.py").write_text(f"scale = {scale}{' ' * scale}\n")
        for function in (absolute, namespace["relative"]):
            for name in ("digested", "digested.inner"):
                monkeypatch.delitem(sys.modules, name, raising=False)
            seen.add(code_digest(function))
    assert len(seen) == 4
