"""Options of a wrong type are refused when data are opened or created, by name, with what is expected."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import TYPE_CHECKING, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import pytest
from made_files import pack

import dataload
from dataload import ConfigError
from dataload._util.checks import check_type
from dataload.convert import convert
from dataload.sources.options import Options
from dataload.sources.registry import built_in_formats

if TYPE_CHECKING:
    from fractions import Fraction

VALUES = {
    **{type(value): value for value in (True, 999, "text", 1.5, None, [object()], b"x", object())},
    Mapping: {"a": object()},
    Callable: lambda record: record,
}
NEEDED = {"window": 8, "split": "train"}
OF_ANY = ("remote", "dtype", "codec")  # classes, or many spellings; they have checks of their own


def allowed(hint):
    """The kinds of values that an annotation allows."""
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        origin = get_origin(kind) or kind
        if origin is Literal:
            yield from map(type, get_args(kind))
        else:
            yield {Sequence: list, npt.NDArray: np.ndarray}.get(origin, origin)


CASES = [
    (f"{entry.name} {kind}", options, each.name)
    for entry in built_in_formats()
    for kind, options in (("reader", entry.reader_options), ("writer", entry.writer_options))
    for each in fields(options)
]


def test_every_option_of_every_format():
    assert len(CASES) > 100
    for name, options, option in CASES:
        needed = {each.name: NEEDED[each.name] for each in fields(options) if each.name in NEEDED}
        kinds = {*allowed(get_type_hints(options)[option])}
        for kind, value in VALUES.items():
            if kind in kinds and kind not in (list, Mapping, str, bool):
                options.parse({**needed, option: value}, name)
            elif kind not in kinds and (option not in OF_ANY or kind not in (str, Mapping, object, Callable)):
                with pytest.raises(ConfigError) as caught:
                    options.parse({**needed, option: value}, name)
                assert re.search(rf"\b{option}\b", str(caught.value)), (name, option, str(caught.value))
                assert caught.value.key == option


ADVICE = "; a function of samples is passed to dataload.Loader as transform=, or to dataload.convert.convert as map="
TAR = "format 'tar': "
BOOL = "must be True or False, got"


def write(path, **options):
    dataload.create(path, **options)


def change(path, **options):
    convert(dataload.RangeSource(3), path, **options)


@pytest.mark.parametrize(
    ("does", "option", "value", "message"),
    [
        (dataload.open, "map", "false", f"{TAR}map {BOOL} 'false'"),
        (dataload.open, "map", 1, f"{TAR}map {BOOL} 1"),
        (dataload.open, "map", len, f"{TAR}map {BOOL} <built-in function len>{ADVICE}"),
        (dataload.open, "transform", len, "format 'tar' has no option 'transform'"),
        (dataload.open, "decode", 3, f"{TAR}decode must be 'auto', 'written', a mapping or None; got 3"),
        (dataload.open, "decode", {"jpg": 3}, f"{TAR}decode must be text or a function, got 3"),
        (dataload.open, "decode", "atuo", 'decode is \'atuo\': give None, "auto", "written" or a mapping'),
        (dataload.open, "missing", "skp", f"{TAR}missing is 'skp': did you mean 'skip'?"),
        (dataload.open, "on_damage", None, f"{TAR}on_damage must be 'error' or 'stop', got None"),
        (dataload.open, "index", [3], f"{TAR}index must be text or a path, got 3"),
        (dataload.open, "storage_options", "x", "storage_options must be a table of options, got str"),
        (dataload.open, "fields", "x", "fields must be a list of names, got the text 'x'"),
        (dataload.open, "fields", 3, "fields must be a list, got 3"),
        (dataload.open, "fields", [3], "fields must be text, got 3"),
        (dataload.open, "format", ["tar"], "format must be text, got ['tar']"),
        (write, "overwrite", "false", f"overwrite {BOOL} 'false'"),
        (write, "index", "no", f"the writer of {TAR}index {BOOL} 'no'"),
        (write, "key", "name", f"the writer of {TAR}key must be a function or None, got 'name'"),
        (write, "shards", "2", "shards must be an integer >= 1, got '2'"),
        (write, "format", 3, "format must be text, got 3"),
        *((change, flag, "false", f"{flag} {BOOL} 'false'") for flag in ("keep_key", "resume", "overwrite", "merge")),
    ],
)
def test_messages(tmp_path, does, option, value, message):
    path = tmp_path / "a.tar"
    if does is dataload.open:
        pack(path, {"0.x": b"1"})
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as caught:
        does(path, **{option: value})
    assert option != "transform" or str(caught.value).endswith(ADVICE)
    assert does is dataload.open or [*tmp_path.iterdir()] == []


def test_every_setting_of_a_loader():
    """No setting takes a value of a type that its annotation does not name."""
    source = dataload.MemorySource([{"a": 1}] * 3)
    hints = get_type_hints(dataload.Loader.__init__)
    for name in inspect.signature(dataload.Loader).parameters.keys() - {"source"}:
        kinds = {*allowed(hints[name])}
        given = {} if name in ("batch_size", "global_batch_size", "batch_sampler") else {"batch_size": 2}
        kinds |= {int} if float in kinds else set()
        for kind, value in VALUES.items():
            if kind not in kinds and not (name in ("sampler", "batch_sampler") or (name, kind) == ("fields", Mapping)):
                with pytest.raises((ConfigError, TypeError)) as caught:
                    dataload.Loader(source, **{**given, name: value})
                assert name.split("_")[0] in str(caught.value), (name, value, str(caught.value))


def test_values_of_numpy_and_annotations_of_others():
    check_type("x", np.int64(3), int)
    check_type("x", np.bool_(True), bool)
    check_type("x", (np.int64(3),), Sequence[int])
    check_type("x", 3, "an annotation that is only text")
    with pytest.raises(ConfigError, match=r"^x must be an integer, got 2\.5$"):
        check_type("x", 2.5, int)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Foreign(Options):
        ratio: Fraction | None = None

    assert Foreign.parse({"ratio": "1/3"}, "theirs").ratio == "1/3"
