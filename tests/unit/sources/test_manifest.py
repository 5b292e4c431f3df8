"""Manifests as values and as JSON: what is refused, what is merged, and what is stale."""

import json
import re

import pytest

from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.find import harmless_options
from dataload.sources.manifest import (
    MOST_BYTES,
    DataSetEntry,
    Manifest,
    ShardEntry,
    merge_manifests,
)
from dataload.sources.manifest_checks import STORED_OPTIONS
from dataload.sources.registry import built_in_formats
from dataload.types import FieldSpec

HASH = "12ab" * 16
SHARDS = (
    ShardEntry("t-0.syr", 10, 1000, '"e0"', HASH),
    ShardEntry("t-1.syr", 9, 900, None, None),
)
FIELDS = {"x": FieldSpec("float32", (3, None)), "s": FieldSpec("str", ()), "v": FieldSpec("int64", None)}


def entry(shards=SHARDS, **changes):
    given = {"pattern": "t-{0..1}.syr", "format": "syrah", "fields": FIELDS, "options": {"shapes": {"x": [3, -1]}}}
    given |= changes
    return DataSetEntry.of(given.pop("pattern"), given.pop("format"), shards, **given)


# A file of this version, as it must always be readable.
TEXT = """{"version":1,"data_sets":[
{"pattern":"t-{0..1}.syr","format":"syrah","options":{"shapes":{"x":[3,-1]}},"fields":{
"x":{"dtype":"float32","shape":[3,null]},"s":{"dtype":"str","shape":[]},"v":{"dtype":"int64","shape":null}},
"records":19,"bytes":1900,"shards":{"name":["t-0.syr","t-1.syr"],"records":[10,9],"bytes":[1000,900],
"etag":["\\"e0\\"",null],"sha256":["HASH",null]}}
]}
""".replace("HASH", HASH)


def test_a_manifest_of_version_1():
    manifest = Manifest((entry(),))
    assert Manifest.parse(TEXT.encode(), "m") == manifest
    assert Manifest.parse(manifest.to_bytes(), "m") == manifest
    assert json.loads(manifest.to_bytes()) == json.loads(TEXT)
    assert manifest.data_sets[0].shards == SHARDS
    assert manifest.find("t-{0..1}.syr") is manifest.find("t-1.syr") is manifest.data_sets[0]
    assert manifest.find("t-2.syr") is None


def test_json_and_back():
    plain = Manifest((entry([ShardEntry("a.syr", 1, 2)], pattern="a.syr"),))
    shards = {"name": ["a.syr"], "records": [1], "bytes": [2], "etag": None, "sha256": None}
    assert json.loads(plain.to_bytes())["data_sets"][0]["shards"] == shards  # what is unknown takes no room
    known = [shard._replace(identity=(5, "ab", identity)) for shard, identity in zip(SHARDS, ["x", ["y"]], strict=True)]
    for shards, pattern in ((known, "a"), ([known[0], SHARDS[1]], "a"), ([ShardEntry("a\udcff.syr", 1, 2)], "a")):
        manifest = Manifest((entry(shards, pattern=pattern),))
        found = Manifest.parse(manifest.to_bytes(), "m")
        assert found == manifest
        assert [shard.identity for shard in found.data_sets[0].shards] == [shard.identity for shard in shards]


def changed(path, value):
    """The manifest with one value replaced; `...` deletes it."""
    table = json.loads(TEXT)
    inside = table
    for key in path[:-1]:
        inside = inside[key]
    if value is ...:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return json.dumps(table).encode()


DATA_SET = ("data_sets", 0)
COLUMNS = (*DATA_SET, "shards")
NO_SHARDS = {"name": [], "records": [], "bytes": [], "etag": None, "sha256": None}
IDENTITY = (*COLUMNS, "identity")
HOSTILE = [
    (("version",), 2, "version: expected 1, which this release reads, but found 2"),
    (("version",), True, "version: expected 1, which this release reads, but found True"),
    (("version",), ..., "version: expected 1, which this release reads, but found None"),
    (("data_sets",), {}, "data_sets: expected a list but found {}"),
    (("data_sets",), ..., "manifest: expected the key 'data_sets' but found only version"),
    (("extra",), 1, "manifest: unknown key extra: Known: data_sets, version"),
    (DATA_SET, [], "data set: expected an object but found []"),
    ((*DATA_SET, "pattern"), "a/b", "pattern: expected a name in the directory of the manifest, not hidden and"),
    ((*DATA_SET, "pattern"), "", "pattern: expected 1 to 4096 characters but found "),
    ((*DATA_SET, "format"), 5, "format: expected 1 to 4096 characters but found 5"),
    ((*DATA_SET, "recods"), 5, "data set: unknown key recods: did you mean 'records'?"),
    ((*DATA_SET, "records"), 18, "records: expected 19, the sum of the shards, but found 18"),
    ((*DATA_SET, "records"), 19.0, "records: expected 19, the sum of the shards, but found 19.0"),
    ((*DATA_SET, "bytes"), 0, "bytes: expected 1900, the sum of the shards, but found 0"),
    ((*DATA_SET, "fields"), [], "fields: expected an object but found []"),
    ((*DATA_SET, "fields", "x", "dtype"), "f8,(9,9)i", "fields.x.dtype: expected the name of a dtype but found f8,(9"),
    ((*DATA_SET, "fields", "x", "shape"), 3, "fields.x.shape: expected a list but found 3"),
    ((*DATA_SET, "fields", "x", "shape"), [-1], "fields.x.shape: expected up to 64 extents, each null or at least 0"),
    ((*DATA_SET, "fields", "x", "shape"), [1] * 65, "fields.x.shape: expected up to 64 extents"),
    ((*DATA_SET, "fields", "x", "classes"), "ab", "fields.x.classes: expected a list but found ab"),
    ((*DATA_SET, "fields", "x", "classes"), [3], "fields.x.classes: expected texts but found 3"),
    ((*DATA_SET, "options"), 3, "options: expected an object but found 3"),
    ((*DATA_SET, "options", "index"), "/etc/passwd", "options: expected one of case_sensitive, codec, "),
    ((*DATA_SET, "options", "codec"), "os:system", "options.codec: expected a value of this option but found os:syste"),
    ((*DATA_SET, "options", "shapes"), {"x": 5}, "options.shapes: expected a value of this option but found {'x': 5}"),
    ((*DATA_SET, "options", "decode"), {"x": 5}, "options.decode: expected a value of this option but found {'x': 5}"),
    ((*DATA_SET, "options", "window"), 1 << 63, "options.window: expected a value of this option but found 92233"),
    (COLUMNS, [], "shards: expected an object but found []"),
    ((*COLUMNS, "name"), ..., "shards: expected the key 'name' but found only records, bytes, etag, sha256"),
    ((*COLUMNS, "name"), "ab", "shards.name: expected a list but found ab"),
    ((*COLUMNS, "name", 1), 5, "shards.name: expected 1 to 4096 characters but found 5"),
    ((*COLUMNS, "name", 1), "", "shards.name: expected 1 to 4096 characters but found "),
    ((*COLUMNS, "name", 1), "a" * 4097, "shards.name: expected 1 to 4096 characters but found aaa"),
    ((*COLUMNS, "name", 1), "../../etc/passwd", "not hidden and without '/', but found ../../etc/passwd"),
    ((*COLUMNS, "name", 1), "/etc/passwd", "not hidden and without '/', but found /etc/passwd"),
    ((*COLUMNS, "name", 1), "..", "not hidden and without '/', but found .."),
    ((*COLUMNS, "name", 1), ".hidden", "not hidden and without '/', but found .hidden"),
    ((*COLUMNS, "name", 1), "a\0b", "not hidden and without '/', but found a\\x00b"),
    ((*COLUMNS, "name", 1), "a\ud800", "not hidden and without '/', but found a\\ud800"),
    ((*COLUMNS, "name", 1), "t-0.syr", "the shard t-0.syr is listed twice"),
    ((*COLUMNS, "records"), [10], "shards.records: expected 2 values, one for each name, but found 1 values"),
    ((*COLUMNS, "records", 0), -1, "shards.records: expected integers from 0 to 9223372036854775807 but found -1"),
    ((*COLUMNS, "records", 0), 1.5, "shards.records: expected integers from 0 to 9223372036854775807 but found 1.5"),
    ((*COLUMNS, "records", 0), True, "shards.records: expected integers from 0 to 9223372036854775807 but found True"),
    ((*COLUMNS, "bytes", 0), 1 << 63, "shards.bytes: expected integers from 0 to 9223372036854775807 but found 92"),
    ((*COLUMNS, "bytes", 0), (1 << 63) - 1, "shards.bytes: expected a sum of at most 9223372036854775807 but found"),
    ((*COLUMNS, "etag", 0), "a\r\nX: y", "shards.etag: expected printable ASCII without spaces but found a\\r\\nX: y"),
    ((*COLUMNS, "etag", 0), "", "shards.etag: expected printable ASCII without spaces but found "),
    ((*COLUMNS, "etag", 0), 7, "shards.etag: expected printable ASCII without spaces but found 7"),
    ((*COLUMNS, "sha256", 0), "AB" * 32, "shards.sha256: expected 64 hexadecimal digits but found ABAB"),
    ((*COLUMNS, "sha256", 0), "ab", "shards.sha256: expected 64 hexadecimal digits but found ab"),
    ((*COLUMNS, "sha256"), [], "shards.sha256: expected 2 values, one for each name, but found 0 values"),
    (COLUMNS, NO_SHARDS, "shards: expected at least one shard but found none"),
    (IDENTITY, [[1, "a", None]], "shards.identity: expected 2 values, one for each name, but found 1 values"),
    (IDENTITY, 5, "shards.identity: expected a list but found 5"),
    *(
        (IDENTITY, [wrong, None], "shards.identity: expected a size, a text, and a text, a list of texts or null but")
        for wrong in (5, [], [-1, "a", "b"], [1, 2, "b"], [1, "a", 5], [1, "a", ["b"] * 17], [1, "a", [["b"]]])
    ),
    ((*COLUMNS, "x\x1b" * 99), 0, "shards: unknown key x\\x1bx\\x1b"),
]


@pytest.mark.parametrize(("path", "value", "message"), HOSTILE)
def test_what_is_refused(path, value, message):
    with pytest.raises(CorruptFileError) as caught:
        Manifest.parse(changed(path, value), "d/dataload.json")
    text = str(caught.value)
    assert text.startswith("d/dataload.json: not a valid manifest: ")
    assert message in text
    assert text.endswith("; if the shards are right, delete dataload.json and run `dataload index --manifest` again")
    assert len(text) < 700


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 100_000, b'{"version": ' + b"9" * 5000 + b"}", b"{}x"])
def test_what_is_not_json(data):
    with pytest.raises(CorruptFileError, match=r"^m: a manifest is JSON, but this is not \(.*\); if the shards are"):
        Manifest.parse(data, "m")


def test_what_is_too_large_or_contradicts_itself():
    for make, error, message in (
        (lambda: Manifest.parse(bytes(MOST_BYTES + 1), "m"), CorruptFileError, "m: a manifest has at most 33,554,432"),
        (lambda: Manifest((entry(), entry())), ConfigError, "two data sets have the pattern t-{0..1}.syr"),
        (lambda: Manifest((entry(), entry(SHARDS[1:], pattern="x"))), ConfigError, "the shard t-1.syr is listed twice"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            make()
    known = {name for each in built_in_formats() for name in each.reader_options.names()}
    harmless = {name for each in built_in_formats() for name in harmless_options(each)}
    assert {*STORED_OPTIONS} <= known
    assert not {*STORED_OPTIONS} & harmless, "paths and caches are no business of a manifest"


def test_stale_shards():
    found = {"t-0.syr": (1000, '"e0"'), "t-1.syr": (900, '"x"')}
    assert list(entry().stale(found)) == [], "an ETag that the manifest does not know is not compared"
    assert list(entry().stale({**found, "t-0.syr": (1000, None)})) == []
    assert list(entry().stale({"t-0.syr": (1001, '"e0"')})) == [
        "t-0.syr has 1,001 bytes, and 1,000 in the manifest",
        "t-1.syr is missing",
    ]
    assert list(entry().stale({**found, "t-0.syr": (1000, '"e1"')})) == [
        't-0.syr has the ETag "e1", and "e0" in the manifest'
    ]


def test_a_data_set_takes_the_place_of_those_that_share_a_shard():
    other = entry([ShardEntry("v.syr", 1, 1)], pattern="v.syr")
    manifest = Manifest((entry(), other))
    wider = entry([*SHARDS, ShardEntry("t-2.syr", 1, 1)], pattern="t-{0..2}.syr")
    assert manifest.with_data_set(wider).data_sets == (wider, other)
    same_name = entry([ShardEntry("u.syr", 1, 1)])
    assert manifest.with_data_set(same_name).data_sets == (same_name, other)
    assert Manifest().with_data_set(other).with_data_set(entry()) == manifest


def test_parts_are_merged():
    first, second = (Manifest((entry([shard]),)) for shard in SHARDS)
    other = Manifest((entry([ShardEntry("v.syr", 1, 1)], pattern="v.syr"),))
    assert merge_manifests([first, other, second]).data_sets == (entry(), *other.data_sets)
    assert merge_manifests([second, first]).data_sets[0].names == ("t-1.syr", "t-0.syr"), "in the order given"
    assert merge_manifests([first, second, first]) == Manifest((entry(),)), "a part that was done twice"
    assert merge_manifests([]) == Manifest()
    without = Manifest((entry(SHARDS[:1], fields={}),))
    assert merge_manifests([without, second]) == Manifest((entry(),)), "a part without records knows no fields"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (entry(SHARDS[1:], format="tar"), "parts of the data set t-{0..1}.syr disagree about format: syrah, tar"),
        (entry(SHARDS[1:], options={}), "disagree about options: {'shapes': {'x': [3, -1]}}, {}"),
        (entry(SHARDS[1:], fields={"y": FieldSpec("int8", ())}), "disagree about fields: "),
        (
            entry([SHARDS[0]._replace(records=11)]),
            "parts disagree about the shard t-0.syr: ShardEntry(name='t-0.syr', re",
        ),
    ],
)
def test_parts_that_disagree(other, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        merge_manifests([Manifest((entry(SHARDS[:1]),)), Manifest((other,))])


def test_10_000_shards_take_few_bytes():
    shards = [ShardEntry(f"train-{i:05d}.tar", i, 10**8 + i, f'"{i:032x}"', f"{i:064x}") for i in range(10_000)]
    data = Manifest((entry(shards),)).to_bytes()
    assert len(data) < 1_500_000
    assert Manifest.parse(data, "m").data_sets[0].shards == tuple(shards)
