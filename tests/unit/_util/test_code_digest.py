"""Functions that differ have other digests, or unknown ones; equal functions have one digest in all processes."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import threading

import functions
import numpy as np
import pyarrow as pa
import pytest

from dataload._util.fingerprint import code_digest


def test_functions_that_differ_in_one_place():
    assert functions.check(40) == []


def test_every_place_by_itself():
    for name, place in functions.PLACES.items():
        one, same, other = (functions.digest(place(value)) for value in (1, 1, 2))
        assert one == same, name
        assert one != other, name
        assert "unknown" not in one, name


def test_a_function_that_has_run_is_the_same():
    def add(record):
        return sum(number + 1 for number in range(record))

    before = code_digest(add)
    for number in range(2000):  # Python replaces instructions of code that runs often
        add(number % 3)
    assert code_digest(add) == before


def test_lines_and_files_do_not_matter():
    scopes = {}, {}
    exec(compile("def f(r):\n    return r + 1", "a.py", "exec"), scopes[0])
    exec(compile("\n\n# x\ndef f(r):\n\n    return r + 1", "b.py", "exec"), scopes[1])
    assert code_digest(scopes[0]["f"]) == code_digest(scopes[1]["f"])


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
