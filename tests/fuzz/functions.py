"""Pairs of functions that differ in one value, in a random place: ``make functions``.

A function is made by a chain of places, each of which holds the value or the next place: a closure, an attribute of an
object, a module that is imported inside the function, and so on. Their digests must differ, or be unknown; those of
equal functions must be equal, also in a process with another seed of hashes.
"""

# ruff: noqa: T201 - a script that tells how far it is

import dataclasses
import enum
import functools
import importlib
import json
import operator
import os
import re
import subprocess
import sys
import tempfile
import types
from collections import OrderedDict, deque, namedtuple
from pathlib import Path
from random import Random

import numpy as np
from drive import command_line

from dataload._util.fingerprint import code_digest


def call(value):
    return value() if callable(value) else value


class Holder:
    def __init__(self, value):
        self.value = value

    def __call__(self, record=None):
        return record, call(self.value)

    def method(self, record=None):
        return record, call(self.value)


@dataclasses.dataclass
class Data:
    value: object
    items: list = dataclasses.field(default_factory=list)

    def __call__(self, record=None):
        return record, self.value


class Fingerprint(Holder):
    def __init__(self, value):
        super().__init__(value)
        self.changes = object()

    def fingerprint(self):
        return f"{self.value}"


def kind(base=Holder, meta=type, **members):
    """Return an object of a new class."""
    return meta("Made", (base,), members)(0)


def of_numbers(make):
    """Use a place that holds only numbers for those, and an attribute for anything else."""
    return lambda value: make(value) if isinstance(value, int) else Holder(value)


def dataclass_default(value):
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        x: object = value if isinstance(value, int) else dataclasses.field(default_factory=lambda: value)

        def __call__(self, record=None):
            return record, self.x

    return Frozen()


def slots(value):
    class Slots:
        __slots__ = ("x",)

        def __call__(self, record=None):
            return record, self.x

    made = Slots()
    made.x = value
    return made


def method_of_a_parent(value):
    class Parent:
        def scale(self):
            return value

    class Child(Parent):
        def __call__(self, record=None):
            return record, super().scale()

    return Child()


def metaclass(value):
    made = type("Meta", (type,), {"__call__": lambda cls, *_: value})("Made", (), {})
    return lambda record=None: (record, made())


def wraps(value):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*arguments):
            return function(*arguments), value

        return wrapper

    return decorate(lambda record=None: record)


def wrapped(value):
    def decorate(function):
        return functools.wraps(function)(lambda *arguments: function(*arguments))

    return decorate(lambda record=None: (record, value))


def nested(value):
    def outer(record=None):
        return (lambda: helper(record))()

    def helper(record):
        return (record, value) if record else outer(record)

    return outer


def function_attribute(value):
    def function(record=None):
        return record, function.x

    function.x = value
    return function


def enumeration(value):
    made = enum.Enum("Made", {"A": value if isinstance(value, int) else Holder(value)})
    return lambda record=None: (record, made.A.value)


def cycle(value):
    made = Holder(value)
    made.own = [made]
    return made


PLACES = {
    "closure": lambda value: lambda record=None: (record, call(value)),
    "default": lambda value: lambda record=None, x=value: (record, call(x)),
    "keyword default": lambda value: lambda record=None, *, x=value: (record, call(x)),
    "attribute": Holder,
    "bound method": lambda value: Holder(value).method,
    "partial": lambda value: functools.partial(operator.add, value),
    "itemgetter": of_numbers(operator.itemgetter),
    "attrgetter": of_numbers(lambda value: operator.attrgetter(f"a{value}")),
    "dataclass": Data,
    "dataclass items": lambda value: Data(1, [value]),
    "dataclass default": dataclass_default,
    "slots": slots,
    "class attribute": lambda value: kind(factor=value),
    "property": lambda value: kind(x=property(lambda self: value)),
    "static method": lambda value: kind(x=staticmethod(lambda: value)),
    "cached property": lambda value: kind(x=functools.cached_property(lambda self: value)),
    "method of a parent": method_of_a_parent,
    "descriptor": lambda value: kind(x=type("Descriptor", (), {"__get__": lambda *_: value})()),
    "metaclass": metaclass,
    "wraps": wraps,
    "wrapped": wrapped,
    "lru_cache": lambda value: functools.lru_cache(lambda record=None: (record, value)),
    "nested": nested,
    "function attribute": function_attribute,
    "list": lambda value: Holder([0, value]),
    "dict": lambda value: Holder({"a": 0, "b": value}),
    "set": lambda value: Holder({"a", "b", "c", value} if isinstance(value, int) else {"a", Holder(value)}),
    "deque": lambda value: Holder(deque([value])),
    "ordered dict": lambda value: Holder(OrderedDict(a=value)),
    "named tuple": lambda value: Holder(namedtuple("Pair", "x y")(value, 0)),
    "namespace": lambda value: Holder(types.SimpleNamespace(x=value)),
    "array": of_numbers(lambda value: Holder(np.arange(3) + value)),
    "array of objects": lambda value: Holder(np.array([value, None], object)),
    "masked array": of_numbers(lambda value: Holder(np.ma.array([1, 2], mask=[value == 1, False]))),
    "pattern": of_numbers(lambda value: Holder(re.compile(f"a{{{value}}}"))),
    "enumeration": enumeration,
    "fingerprint": of_numbers(Fingerprint),
    "cycle": cycle,
}

# Functions in modules; the value is a text in their helpers.
MODULES = {
    "an attribute of a module": "import helper\ndef f(r):\n    return helper.scale(r)",
    "a constant of a module": "import helper\ndef f(r):\n    return r * helper.VALUE",
    "a submodule": "import pack.sub\ndef f(r):\n    return pack.sub.scale(r)",
    "a global value": "from helper import VALUE\ndef f(r):\n    return r * VALUE",
    "a helper": "from helper import scale\ndef f(r):\n    return scale(r)",
    "a local import": "def f(r):\n    import helper\n    return helper.scale(r)",
    "another name": "def f(r):\n    import helper as h\n    return [h.VALUE for _ in r]",
    "a local submodule": "def f(r):\n    import pack.sub\n    return pack.sub.scale(r)",
    "a submodule by another name": "def f(r):\n    import pack.sub as s\n    return s.scale(r)",
    "from": "def f(r):\n    from helper import other, scale as s\n    return s(r)",
    "from a package": "def f(r):\n    from pack import sub\n    return sub.scale(r)",
    "in a function within": "def f(r):\n    import helper\n    return (lambda: helper.scale(r))()",
    "in a closure": "def make():\n    import helper\n    return lambda r: helper.scale(r)\nf = make()",
    "in a method": "class C:\n    def __call__(self, r):\n        import helper\n        return helper.VALUE\nf = C()",
    "after another import": (
        "def f(r):\n    try:\n        import nothing_here as h\n    except ImportError:\n        import helper as h\n"
        "    return h.scale(r)"
    ),
    "in the body of a class": "import helper as h\ndef f(r):\n    class C:\n        k = h.VALUE\n        j = k",
    "a class of a module": "import helper\ndef f(r):\n    return helper.Thing().go()",
    "an object of a module": "import helper\ndef f(r):\n    return helper.thing.go()",
    "a parent of a module": "import helper\nclass C(helper.Thing):\n    __call__ = helper.Thing.go\nf = C()",
    "a decorator of a module": "import helper\n@helper.decorate\ndef f(r):\n    return r",
    "a context": "import helper\ndef f(r):\n    with helper.context() as x:\n        return x",
    "a lambda": "import helper\nf = lambda r: helper.scale(r)",
    "a global import": "def f(r):\n    global h\n    import helper as h\n    return h.scale(r)",
    "the module": "import helper\ndef f(r):\n    return getattr(helper, 'scale')(r)",
    "a default": "import helper\ndef f(r, h=helper):\n    return h.scale(r)",
    "the dict of a module": "import helper\ndef f(r):\n    return helper.__dict__['VALUE']",
    "a module by its name": "import importlib\ndef f(r):\n    return importlib.import_module('helper').scale(r)",
    "sys.modules": "import helper, sys\ndef f(r):\n    return sys.modules['helper'].scale(r)",
    "eval": "import helper\ndef f(r):\n    return eval('helper.scale(r)')",
    "globals": "import helper\ndef f(r):\n    return globals()['helper'].scale(r)",
    "a variable that is a module": "import helper\ndef f(r):\n    h = helper\n    return h.scale(r)",
}
UNKNOWN = [*MODULES][-8:]
HELPER = """
import contextlib, functools
VALUE = {value}
def scale(r): return r * {value}
def other(r): return 0
@contextlib.contextmanager
def context(): yield {value}
class Thing:
    def go(self): return {value}
thing = Thing()
def decorate(f):
    return functools.wraps(f)(lambda r: f(r) * {value})
"""


def digest(function):
    try:
        return code_digest(function)
    except ValueError as error:
        return f"unknown: {error}"


def made(number, value):
    """Return the function of a number, with the value in its last place."""
    random = Random(number)
    names = random.choices(sorted(PLACES), k=random.choice([1, 1, 2, 3]))
    for name in names:
        value = PLACES[name](value)
    return names, value


def in_modules(value, directory):
    """Return the digests of functions in modules with a value, which are written and imported again."""
    for name, text in (("helper", HELPER), ("pack/sub", HELPER), ("pack/__init__", "from pack import sub\n")):
        path = Path(directory, f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("{value}", str(value)))
    Path(directory, "pack", "relative.py").write_text("def f(r):\n    from . import sub\n    return sub.scale(r)\n")
    found = {}
    sys.path.insert(0, str(directory))
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("helper", "pack")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        for name, text in MODULES.items():
            scope = {"__name__": "made", "__builtins__": __builtins__}
            exec(compile(f"# {directory}\n{text}\n", f"{directory}/made.py", "exec"), scope)
            found[name] = digest(scope["f"])
        found["a relative import"] = digest(importlib.import_module("pack.relative").f)
    finally:
        sys.path.remove(str(directory))
        sys.dont_write_bytecode = written
    return found


def elsewhere(count, seed):
    """Return the digests that another process computes, with another seed of hashes."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--count", str(count), "--print", directory]
        done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": str(seed)}, capture_output=True, check=True)
    return json.loads(done.stdout)


def check(count):
    """Compare so many pairs, and return lines about what is wrong."""
    there = elsewhere(count, seed=7)
    wrong = []
    for number, other in enumerate(there["made"]):
        names, function = made(number, 1)
        one, two = digest(function), digest(made(number, 2)[1])
        if one != other:
            wrong.append(f"{number} {names}: {one} here, {other} in another process")
        if one == two and not one.startswith("unknown: "):
            wrong.append(f"{number} {names}: two functions have the digest {one}")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        ours, others = in_modules(1, first), in_modules(2, second)
    for name, one in ours.items():
        if one != there["modules"][name]:
            wrong.append(f"{name}: {one} here, {there['modules'][name]} in another process")
        if one.startswith("unknown: ") != (name in UNKNOWN) or (one == others[name] and name not in UNKNOWN):
            wrong.append(f"{name}: {one}, and {others[name]} with another value")
    return wrong


def main():
    given = command_line(__doc__, count=5000, print="")
    if given.print:
        digests = [digest(made(number, 1)[1]) for number in range(given.count)]
        print(json.dumps({"made": digests, "modules": in_modules(1, given.print)}))
        return 0
    wrong = check(given.count)
    print(*wrong, sep="\n")
    print(f"{given.count} pairs and {len(MODULES)} modules: {len(wrong)} are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
