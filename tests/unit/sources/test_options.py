"""Options: those of a wrong type are refused by name, and `max_record_bytes` holds in every format of files."""

import inspect
import io
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import pytest
from every_format import small_sets
from made_files import pack
from written import written

import dataload
from dataload import ConfigError
from dataload.convert import convert
from dataload.errors import CorruptFileError, SourceError
from dataload.sources.file_source import FileSource
from dataload.sources.format import Format
from dataload.sources.options import short_repr
from dataload.sources.registry import built_in_formats
from dataload.sources.shards import ShardReader
from dataload.sources.tokens import TokenOptions

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
        elif kind is float:
            yield from (int, float)
        else:
            yield {Sequence: list, npt.NDArray: np.ndarray}.get(origin, origin)


OPTIONS = [
    (f"{entry.name} {kind}", options, each.name)
    for entry in built_in_formats()
    for kind, options in (("reader", entry.reader_options), ("writer", entry.writer_options))
    for each in fields(options)
]


def test_every_option_of_every_format():
    assert len(OPTIONS) > 100
    for name, options, option in OPTIONS:
        needed = {each.name: NEEDED[each.name] for each in fields(options) if each.name in NEEDED}
        kinds = {*allowed(get_type_hints(options)[option])} - ({type(None)} if option == "dtype" else set())  # numpy 1
        for kind, value in VALUES.items():
            if kind in kinds and kind not in (list, Mapping, str, bool):
                options.parse({**needed, option: value}, name)
            elif kind not in kinds and (option not in OF_ANY or kind not in (str, Mapping, object, Callable)):
                with pytest.raises(ConfigError) as caught:
                    options.parse({**needed, option: value}, name)
                assert re.search(rf"\b{option}\b", str(caught.value)), (name, option, str(caught.value))
                assert caught.value.key == option


@pytest.mark.parametrize(
    ("name", "old"), [("array_record", "verify_hashes"), ("lmdb", "verify_pages"), ("tfrecord", "verify_checksums")]
)
def test_verify_has_old_names_by_format(name, old):
    (entry,) = (each for each in built_in_formats() if each.name == name)
    with pytest.warns(DeprecationWarning, match=f"the option '{old}' is deprecated since 0.3: pass verify="):
        found = entry.reader_options.parse({old: True}, name)
    assert found.verify
    assert not found.cache
    assert found == entry.reader_options(verify=True)


def test_verify_options_of_a_format_are_deprecated():
    with pytest.warns(DeprecationWarning, match="give the reader an option `verify`") as warned:
        Format(name="own", source="own:Own", verify_options={"strict": True})
    assert [each.filename for each in warned] == [__file__]


ADVICE = ": a function of samples is passed to dataload.Loader as transform=, or to dataload.convert.convert as map="
TAR = "format 'tar': "
BOOL = "must be True or False, got"


def create(path, **options):
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
        (dataload.open, "decode", "atuo", f"{TAR}decode must be 'auto', 'written', a mapping or None; got 'atuo'"),
        (dataload.open, "missing", "skp", f"{TAR}missing is 'skp': did you mean 'skip'?"),
        (dataload.open, "on_damage", None, f"{TAR}on_damage must be 'error' or 'stop', got None"),
        (dataload.open, "index", [3], f"{TAR}index must be text or a path, got 3"),
        (dataload.open, "storage_options", "x", "storage_options must be a table of options, got str"),
        (dataload.open, "fields", "x", "fields must be a list of names, got the text 'x'"),
        (dataload.open, "fields", 3, "fields must be a list, got 3"),
        (dataload.open, "fields", [3], "fields must be text, got 3"),
        (dataload.open, "format", ["tar"], "format must be text, got ['tar']"),
        (create, "overwrite", "false", f"overwrite {BOOL} 'false'"),
        (create, "index", "no", f"the writer of {TAR}index {BOOL} 'no'"),
        (create, "key", "name", f"the writer of {TAR}key must be a function or None, got 'name'"),
        (create, "shards", "2", "shards must be an integer >= 1, got '2'"),
        (create, "format", 3, "format must be text, got 3"),
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
        given = {} if name in ("batch_size", "global_batch_size") else {"batch_size": 2}
        kinds |= {int} if float in kinds else set()
        for kind, value in VALUES.items():
            if kind not in kinds and not (name == "sampler" or (name, kind) == ("fields", Mapping)):
                with pytest.raises((ConfigError, TypeError)) as caught:
                    dataload.Loader(source, **{**given, name: value})
                assert name.split("_")[0] in str(caught.value), (name, value, str(caught.value))


LIMIT = 1_000
SIZES = [10, 800, 1_100, 10]
BAD = 2
TOO_LARGE = r"the record takes [\d,]+ bytes of memory, and max_record_bytes is 1,000: the file is damaged or malicious"
FORMATS = [entry for entry in built_in_formats() if entry.takes_paths]


def arrays_of(size):
    return {"x": np.zeros(size, np.uint8)}


def text_of(size):
    return {"x": "a" * size}


ARRAYS = {"options": "group_size:1,uncompressed"}
NPZ = {"codec": "npz"}
DECODED = {"decode": "auto"}
CASES = [
    ("a.lmdb", bytes, {}, {}),
    ("a.lmdb", arrays_of, NPZ, NPZ),
    ("a.torchrecord", arrays_of, {}, {}),
    ("a.syr", arrays_of, {}, {}),
    ("a.syr", text_of, {}, {}),
    ("a.tar", lambda size: {"x": bytes(size)}, {}, {}),
    ("a.tar", arrays_of, {}, DECODED),
    ("a.tar", text_of, {}, DECODED),
    ("a.array_record", bytes, ARRAYS, {}),
    ("a.array_record", bytes, {}, {}),
    ("a.array_record", arrays_of, {**ARRAYS, **NPZ}, NPZ),
]


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(
    ("name", "record", "writing", "reading", "one_length"),
    [*((*case, False) for case in CASES), (*CASES[0], True), (*CASES[3], True)],
)
def test_a_record_that_is_stored_in_more(tmp_path, name, record, writing, reading, one_length, mapped):
    # archives of numpy have some bytes more than their arrays
    sizes = [size // 4 if "codec" in writing and size < LIMIT else size for size in SIZES]
    good = [0, 1, 3]
    if one_length:
        sizes, good = [1_100] * 4, []
    path = written(tmp_path / name, map(record, sizes), **writing)
    with dataload.open(path, **reading, map=mapped) as source:
        assert len(source.read([BAD])) == 1
        default = source.fingerprint()
    with dataload.open(path, **reading, map=mapped, max_record_bytes=LIMIT) as source:
        assert not good or source.fingerprint() == default
        assert len(source.read(good)) == len(good)
        for read in (source.read, source.read_batch):
            with pytest.raises(CorruptFileError, match=TOO_LARGE) as caught:
                read([*good[:1], BAD, *good[1:2]])
            assert caught.value.index == BAD
            assert str(path) in caught.value.path


def test_a_repr_has_as_many_options_as_are_short():
    text = "b" * 58  # with its quotes, the longest that is shown
    for path, options, shown in (
        ("a", {"x": text, "y": f"{text}b"}, f"x='{text}', y=..."),
        ("a", dict.fromkeys("xyz", text), f"x='{text}', y='{text}', ..."),
        ("a" * 99, dict.fromkeys("xyz", text), f"x='{text}', ..."),
        ("a" * 184, {"x": 1}, "x=1"),
        *(("a" * length, {"x": 10}, "...") for length in (184, 999)),  # long: a path of bytes that are not text
    ):
        assert short_repr("S", [path], options) == f"S({path}, {shown})"


def test_a_sparse_archive_that_claims_much(tmp_path):
    path = tmp_path / "a.tar"
    info = tarfile.TarInfo("0.bin")
    info.size = 1 << 40
    with open(path, "wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(512 + info.size + 1024)
    with pytest.raises(CorruptFileError, match=r"the record takes 1,099,511,627,776 bytes of memory, and max_record_b"):
        dataload.open(path)[0]


def zipped():
    np.savez_compressed(stream := io.BytesIO(), x=np.zeros(10_000))
    return {"x.npz": stream.getvalue()}


NUMBERS = [{"x": np.zeros(count, np.int64)} for count in (10, 900)]  # of one byte each
EXAMPLE = {"codec": "example"}


@pytest.mark.parametrize(
    ("name", "records", "writing", "reading", "message"),
    [
        ("a.torchrecord", NUMBERS, {}, {}, "key 1 of sub-database db0: .* a list of 900 integers takes 7,200"),
        ("a.lmdb", NUMBERS, EXAMPLE, EXAMPLE, "record 1: a list of 900 integers takes 7,200 bytes"),
        ("a.tar", [zipped()] * 2, {}, DECODED, "field 'x' of '0+1': an archive of 1 members takes 80,128 bytes"),
    ],
)
def test_a_codec_of_a_format_has_the_limit(tmp_path, name, records, writing, reading, message):
    source = dataload.open(written(tmp_path / name, records, **writing), **reading, max_record_bytes=LIMIT)
    for read in (source.read, source.read_batch):
        with pytest.raises(CorruptFileError, match=message):
            read([1])


@pytest.mark.parametrize("entry", FORMATS, ids=lambda entry: entry.name)
def test_every_format_has_the_options_of_files(entry):
    required = {"tokens": {"window": 2}, "tfds": {"split": "train"}}.get(entry.name, {})
    found = entry.reader_options.parse(required, "x")
    assert (found.max_record_bytes, found.remote_settings) == (1 << 30, None)
    found = entry.reader_options.parse({**required, "storage_options": {"region": "x"}}, "x")
    assert (found.remote_settings.store.arguments(), found.storage_options) == ({"region": "x"}, None)
    assert "max_record_bytes" not in entry.reader_options.parse({**required, "max_record_bytes": 5}, "x").content()
    for wrong in (0, -1, 1.5, "1", True, None):
        with pytest.raises(ConfigError, match=f"max_record_bytes must be an integer >= 1, got {wrong!r}"):
            entry.reader_options.parse({**required, "max_record_bytes": wrong}, "x")


def test_no_fields_are_none_of_any_format(tmp_path):
    for name, (path, options) in small_sets(tmp_path).items():
        if name != "tfrecord":  # bytes
            assert dataload.open(path, **options).read_batch([0, 0], []) == {}, name


def test_windows_of_tokens():
    assert TokenOptions(window=500, max_record_bytes=LIMIT).window == 500
    with pytest.raises(ConfigError, match="window is 501, more tokens of uint16 than max_record_bytes allows, 1,000"):
        TokenOptions(window=501, max_record_bytes=LIMIT)


class Reader(ShardReader):
    def __len__(self):
        return 3

    def read(self, indices, fields):
        return np.empty((len(indices), 1 << 60), np.uint8)


class Greedy(FileSource):
    format_name = "greedy"

    def _open_shard(self, path):
        return Reader()


def test_a_reader_that_returns_too_few_records(monkeypatch):
    monkeypatch.setattr(Reader, "read", lambda *_: [{"x": 1}])
    with pytest.raises(SourceError, match=r"^Reader.read returned 1 records for 2 indices$"):
        Greedy(["a"]).read_batch([0, 1])


@pytest.mark.parametrize("sources", [["a"], ["ab"], ["a", "b"]])
def test_memory_that_there_is_not(sources, monkeypatch):
    source = dataload.concat([Greedy([*paths]) for paths in sources])
    message = (
        r"Greedy\(.*\): reading 2 records at once needs more memory than this process may have: read fewer "
        r"at once \(batch_size\), or lower max_record_bytes, so that larger ones are refused"
    )
    for read in (source.read, source.read_batch):
        with pytest.raises(SourceError, match=message) as caught:
            read([0, 1])
        assert isinstance(caught.value.__cause__, MemoryError)
        assert caught.value.path == "a"
    monkeypatch.setattr(Greedy, "_open_shard", lambda *_: np.empty(1 << 60, np.uint8))
    with pytest.raises(SourceError, match="cannot read a: this needs more memory than the process may use; the file"):
        len(Greedy([*sources[0]]))
