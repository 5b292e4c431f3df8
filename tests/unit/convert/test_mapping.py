"""What a conversion's function may return, which records are left out, and how a function is told from another."""

import functools
import importlib
import os

import numpy as np
import pytest

import dataload
from dataload import DROP, ConfigError, WorkerError
from dataload.cli.convert import parse_max_bad
from dataload.convert import convert
from dataload.convert.mapping import MapFunction
from dataload.errors import StoreError


def source_of(count):
    return dataload.MemorySource([{"n": np.array(i)} for i in range(count)])


def numbers(path, **options):
    return [int(record["n"]) for record in dataload.open(path, **options)]


RETURNED = {  # by the number of a record: the numbers of the records to write, None for DROP, an int for no list
    0: None,
    1: [],
    2: 20,
    3: [30, 31, 32],
    4: [40],
    5: None,
    6: [60, None, 61],
    7: 70,
}


def returned(sample):
    def record(n):
        return DROP if n is None else {"n": np.array(n)}

    found = RETURNED[int(sample["n"])]
    return [record(n) for n in found] if isinstance(found, list) else record(found)


@pytest.mark.parametrize("shards", [None, 2, 8])
def test_what_a_function_may_return(tmp_path, shards):
    seen = []
    report = convert(source_of(8), tmp_path / "a.syr", shards=shards, map=returned, progress=lambda *p: seen.append(p))
    assert numbers(tmp_path) == numbers(report.pattern) == [20, 30, 31, 32, 40, 60, 61, 70]
    assert (report.records, report.skipped, report.bad_records) == (8, 0, ())
    assert seen[-1] == (8, 8), "records of the source"
    with dataload.open(tmp_path / "a.syr" if shards is None else report.pattern) as found:
        expected = {None: (8,), 2: (4, 4), 8: (0, 0, 1, 3, 1, 0, 2, 1)}
        assert found.shard_lengths == expected[shards]
    again = convert(source_of(8), tmp_path / "a.syr", shards=shards, map=returned, resume=True)
    assert (again.records, again.resumed) == (8, 8)


def test_a_function_may_change_the_sample(tmp_path):
    def add(sample):
        sample["n"] += 1
        return sample

    samples = [{"n": np.array(n)} for n in range(3)]  # the first is seen twice
    convert(samples, tmp_path / "a.syr", map=add)
    assert numbers(tmp_path / "a.syr") == [1, 2, 3]
    assert [int(sample["n"]) for sample in samples] == [0, 1, 2]


NOTHING = (
    r"test_mapping\..*<lambda> returned None for record 0 of the source: return a record, a list of records, or "
    r"dataload\.DROP to write none"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_error": "replace"}, "on_error='replace' would write another record twice: choose 'raise' or 'skip' for"),
        ({"on_error": "skp"}, r"on_error is 'skp': did you mean 'skip'\?"),
        ({"max_bad": -1}, "max_bad must be an integer >= 0 or a share of the records above 0 and at most 1, got -1"),
        ({"seed": 0.5}, r"seed must be an integer, got 0\.5 \(float\)"),
        ({"map": "f"}, "map must be a function of a sample, got 'f'"),
        ({"error_report": "none/x"}, "error_report must be the path of a file that can be written to, got 'none/x'"),
        ({"map": lambda _: None, "on_error": "skip"}, NOTHING),
        ({"map": lambda _: [None], "on_error": "skip"}, NOTHING),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        convert(source_of(2), tmp_path / "a.syr", **arguments)
    assert os.listdir(tmp_path) == []


def test_keys_of_samples_tell_the_index_and_the_number_in_a_list(tmp_path):
    report = convert(source_of(8), tmp_path / "a.tar", shards=2, map=returned)
    assert [record["__key__"] for record in dataload.open(report.pattern)] == [
        "00000002",
        *(f"00000003-{number:04d}" for number in range(3)),
        "00000004-0000",
        "00000006-0000",
        "00000006-0002",
        "00000007",
    ]


def test_records_of_a_list_have_keys_of_their_own(tmp_path):
    def crops(sample):
        own = {**sample, "__key__": sample["__key__"] + "b"}
        return [[sample, sample], [sample, own], sample][int(sample["n"])]

    with dataload.create(tmp_path / "a.tar") as writer:
        writer.extend({"__key__": f"k/{name}", "n": np.array(i)} for i, name in enumerate("xyz"))
    with dataload.open(tmp_path / "a.tar", decode="auto") as source:
        convert(source, tmp_path / "b.tar", map=crops)
        convert(source, tmp_path / "b.syr", map=crops, keep_key=True)
    keys = ["k/x-0000", "k/x-0001", "k/y", "k/yb", "k/z"]
    assert [record["__key__"] for record in dataload.open(tmp_path / "b.tar")] == keys
    assert [record["__key__"] for record in dataload.open(tmp_path / "b.syr")] == keys


# The first record that is written decides


@pytest.mark.parametrize("suffix", [".syr", ".tar", ".lmdb", ".array_record", ".torchrecord"])
def test_shards_may_be_empty(tmp_path, suffix):
    report = convert(source_of(6), tmp_path / f"a{suffix}", shards=3, map=lambda s: s if 2 <= s["n"] < 4 else DROP)
    assert numbers(tmp_path) == numbers(report.pattern) == [2, 3]
    assert dataload.open(report.pattern).shard_lengths == (0, 2, 0)
    report = convert(source_of(5), tmp_path / f"b{suffix}", shards=2, map=lambda _: DROP)
    assert report.records == len(dataload.open(report.pattern)) == 0


class Flawed:
    """A source of which some records cannot be read, neither alone nor with others."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index in {0, 7, 8, 31}:
            raise ValueError(f"no {index}")
        return {"n": np.array(index)}


def fragile(sample):
    if int(sample["n"]) in {5, 9}:
        raise KeyError("label")
    return DROP if sample["n"] == 20 else sample


GOOD = [n for n in range(40) if n not in {0, 5, 7, 8, 9, 20, 31}]


def test_bad_records_are_left_out_and_listed(tmp_path):
    arguments = {"shards": 4, "map": fragile, "on_error": "skip", "max_bad": 6}
    report = convert(Flawed(), tmp_path / "a.tar", **arguments, error_report=tmp_path / "bad.jsonl")
    assert numbers(report.pattern, decode="auto") == GOOD
    assert (report.records, report.skipped) == (len(GOOD), 6)
    assert [(bad.index, bad.stage, bad.error, bad.cause) for bad in report.bad_records] == [
        (0, "read", "ValueError", "no 0"),
        (5, "transform 'fragile'", "KeyError", "'label'"),
        (7, "read", "ValueError", "no 7"),
        (8, "read", "ValueError", "no 8"),
        (9, "transform 'fragile'", "KeyError", "'label'"),
        (31, "read", "ValueError", "no 31"),
    ]
    assert {(bad.epoch, bad.step - bad.index) for bad in report.bad_records} == {(0, 0)}
    loader = dataload.Loader(Flawed(), batch_size=40, exclude=tmp_path / "bad.jsonl")
    assert [batch["n"].tolist() for batch in loader] == [sorted([*GOOD, 20])], "the report is one of a loader, too"


BAD = r"^the conversion failed: bad records so far: {}, and max_bad allows {}; the last is index {}"


def test_too_many_bad_records(tmp_path):
    message = BAD.format(r"4 of 9 \(44\.44%\)", 3, 8)
    arguments = {"shards": 5, "map": fragile, "on_error": "skip"}  # shards of eight records
    for resume in (False, True):
        with pytest.raises(WorkerError, match=message) as caught:
            convert(Flawed(), tmp_path / "a.syr", **arguments, max_bad=3, resume=resume)
        assert (caught.value.epoch, caught.value.step, caught.value.indices) == (0, 8, (8,))
    report = convert(Flawed(), tmp_path / "a.syr", **arguments, max_bad=6, resume=True)
    assert (report.skipped, len(report.bad_records), report.resumed) == (6, 3, 5)
    assert numbers(tmp_path) == GOOD


def test_the_first_bad_record_is_an_error_by_default(tmp_path):
    with pytest.raises(ValueError, match="no 0"):
        convert(Flawed(), tmp_path / "a.syr")
    with pytest.raises(WorkerError) as caught:
        convert(source_of(10), tmp_path / "a.syr", map=fragile)
    assert str(caught.value) == (
        "record 5 of the source failed in transform 'fragile': KeyError: 'label'\n  location: record 5\n"
        "  on_error='skip' leaves such records out"
    )
    assert isinstance(caught.value.__cause__, KeyError)
    assert (caught.value.step, caught.value.indices) == (5, (5,))
    assert os.listdir(tmp_path) == []


def test_a_store_that_does_not_answer_is_no_bad_record(tmp_path):
    def ask(_):
        raise StoreError("no answer")

    class Asking(Flawed):
        def __getitem__(self, index):
            ask(index)

    with pytest.raises(StoreError, match=r"^no answer$"):
        convert(Asking(), tmp_path / "a.syr", on_error="skip")
    with pytest.raises(WorkerError, match=r"failed in transform '.*ask': StoreError: no answer\n  location: record 0$"):
        convert(source_of(2), tmp_path / "a.syr", map=ask, on_error="skip")


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Write a module and import it again."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        (tmp_path / "prepared_here.py").write_text(text)
        importlib.invalidate_caches()
        module = importlib.import_module("prepared_here")
        module.__dict__.pop("__version__", None)
        return importlib.reload(module)

    return write


TEXT = "def keep(sample):\n    return sample\n"


def test_a_function_that_has_changed_is_another_one(tmp_path, write_module):
    def run(text):
        convert(source_of(4), tmp_path / "a.syr", shards=2, map=write_module(text).keep, resume=True)

    run(TEXT)
    run(f"# elsewhere\n\n{TEXT}")
    told = r"prepared_here\.keep \(sha256 [0-9a-f]{16}\) when it began, prepared_here\.keep \("
    for text, now in (
        (TEXT.replace("return", "pass; return"), r"sha256 [0-9a-f]{16}\) now$"),
        (f"__version__ = '1.2'\n{TEXT}", r"version 1\.2, sha256 [0-9a-f]{16}\) now$"),
    ):
        with pytest.raises(ConfigError, match=rf"is the journal of a different conversion\n  map: {told}{now}"):
            run(text)
    with pytest.raises(ConfigError, match=r"a different conversion\n  map: .*\) when it began, not set now$"):
        convert(source_of(4), tmp_path / "a.syr", shards=2, resume=True)


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, sample):
        return {"n": sample["n"] * self.factor}

    def __repr__(self):
        return f"Scale({self.factor})"


def scale(sample, factor):
    return {"n": sample["n"] * factor}


@pytest.mark.parametrize("make", [Scale, lambda factor: functools.partial(scale, factor=factor)])
def test_arguments_of_a_function_tell_and_are_not_shown(make):
    one, same, other = (MapFunction.of(make(factor)) for factor in ("secret", "secret", "other"))
    assert one.entry == same.entry
    assert one.entry != other.entry
    assert one.entry._replace(sha256="") == other.entry._replace(sha256="")
    assert "secret" not in f"{one.entry}{one}"
    assert "self.factor" in one.entry.source or "* factor" in one.entry.source
    assert MapFunction.of(one) is one


def test_functions_without_source():
    made = eval(compile("lambda s: s", "<nowhere>", "eval"))
    assert MapFunction.of(np.asarray).entry.source == MapFunction.of(made).entry.source == ""
    assert MapFunction.of(dict).entry.name == "builtins.dict"
    # Its repr has an address, which differs in each process.
    assert MapFunction.of(functools.partial(scale, factor=object())) != MapFunction.of(scale)
    made = [MapFunction.of(functools.partial(scale, factor=object())).entry for _ in range(2)]
    assert made[0] == made[1]


def test_a_limit_on_the_command_line():
    limits = {"50": 50, "0": 0, "0.05": 0.05, "5%": 0.05, "100%": 1.0, "2.5%": 0.025, "1.0": 1.0}
    for text, value in limits.items():
        found = parse_max_bad(text)
        assert (found, type(found)) == (value, type(value)), text
    for text in ("", "many", "%", "1e", "5 %%"):
        with pytest.raises(ConfigError, match=r"--max-bad is a number of records, or a fraction such as 0\.05 or 5%"):
            parse_max_bad(text)
