"""Manifests and their statistics, as values and as JSON: what is refused, what is merged, and what is stale.

What holds for any manifest is in tests/properties/test_manifest.py.
"""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from dataload.catalog.checks import MapEntry
from dataload.catalog.facts import DataSetFacts, Evidence, Found, ShardFacts
from dataload.catalog.manifest import MOST_BYTES, Manifest
from dataload.catalog.statistics import DataSetStatistics, FieldStatistics, LengthsFile, merge_fields
from dataload.convert.measuring import measure
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.memory import MemorySource
from dataload.types import FieldSpec

HASH = "12ab" * 16
SHARDS = (ShardFacts("t-0.syr", 1000, 10, HASH, evidence=Evidence(0, '"e0"')), ShardFacts("t-1.syr", 900, 9))
FIELDS = {"x": FieldSpec("float32", (3, None)), "s": FieldSpec("str", ()), "v": FieldSpec("int64", None)}


def entry(shards=SHARDS, **changes):
    given = {"pattern": "t-{0..1}.syr", "format": "syrah", "fields": FIELDS, "options": {"shapes": {"x": [3, -1]}}}
    given |= changes
    return DataSetFacts.of(given.pop("pattern"), given.pop("format"), shards, **given)


OTHER = entry([ShardFacts("v.syr", 1, 1)], pattern="v.syr")

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
    assert json.loads(manifest.to_bytes()) == json.loads(TEXT)
    assert manifest.data_sets[0].shards == SHARDS
    assert manifest.find("t-{0..1}.syr") is manifest.find("t-1.syr") is manifest.data_sets[0]
    assert manifest.find("t-2.syr") is None


def changed(table, path, value):
    """The table with one value replaced; `...` deletes it."""
    *path, last = (int(key) if key.isdigit() else key for key in path.split("."))
    inside = table = json.loads(json.dumps(table))
    for key in path:
        inside = inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return table


FIRST = "data_sets.0"
COLUMNS = f"{FIRST}.shards"
PLAIN = "expected a name in the directory of the manifest, not hidden and without '/',"
COUNTS = "expected integers from 0 to 9223372036854775807"
OPTION = "expected a value of this option"
EXTENTS = "expected up to 64 extents, each null or at least 0"
TAG = "expected printable ASCII without spaces"
IDENTITY = "expected a size, a text, and a text, a list of texts or null"
NO_IDENTITIES = (5, [], [-1, "a", "b"], [1, 2, "b"], [1, "a", 5], [1, "a", ["b"] * 17], [1, "a", [["b"]]])

# place, what is said before "but found" and the value, values
UNFIT = [
    ("version", "version: expected 1, which this release reads,", [2, True]),
    ("data_sets", "data_sets: expected a list", [{}]),
    (FIRST, "data set: expected an object", [[]]),
    (f"{FIRST}.pattern", f"pattern: {PLAIN}", ["a/b"]),
    (f"{FIRST}.pattern", "pattern: expected 1 to 4096 characters", [""]),
    (f"{FIRST}.format", "format: expected 1 to 4096 characters", [5]),
    (f"{FIRST}.records", "records: expected 19, the sum of the shards,", [18, 19.0]),
    (f"{FIRST}.bytes", "bytes: expected 1900, the sum of the shards,", [0]),
    (f"{FIRST}.fields", "fields: expected an object", [[]]),
    (f"{FIRST}.fields.x.dtype", "fields.x.dtype: expected the name of a dtype", ["f8,(9,9)i"]),
    (f"{FIRST}.fields.x.shape", "fields.x.shape: expected a list", [3]),
    (f"{FIRST}.fields.x.shape", f"fields.x.shape: {EXTENTS}", [[-1], [1] * 65]),
    (f"{FIRST}.fields.x.classes", "fields.x.classes: expected a list", ["ab"]),
    (f"{FIRST}.options", "options: expected an object", [3]),
    (f"{FIRST}.options.codec", f"options.codec: {OPTION}", ["os:system"]),
    (f"{FIRST}.options.shapes", f"options.shapes: {OPTION}", [{"x": 5}]),
    (f"{FIRST}.options.decode", f"options.decode: {OPTION}", [{"x": 5}]),
    (f"{FIRST}.options.window", f"options.window: {OPTION}", [1 << 63]),
    (COLUMNS, "shards: expected an object", [[]]),
    (f"{COLUMNS}.name", "shards.name: expected a list", ["ab"]),
    (f"{COLUMNS}.name.1", "shards.name: expected 1 to 4096 characters", [5, "", "a" * 4097]),
    (f"{COLUMNS}.name.1", PLAIN, ["../../etc/passwd", "/etc/passwd", "..", ".hidden", "a\0b", "a\ud800"]),
    (f"{COLUMNS}.records.0", f"shards.records: {COUNTS}", [-1, 1.5, True]),
    (f"{COLUMNS}.bytes.0", f"shards.bytes: {COUNTS}", [1 << 63]),
    (f"{COLUMNS}.etag.0", f"shards.etag: {TAG}", ["a\r\nX: y", "", 7]),
    (f"{COLUMNS}.sha256.0", "shards.sha256: expected 64 hexadecimal digits", ["AB" * 32, "ab"]),
    (f"{COLUMNS}.identity", "shards.identity: expected a list", [5]),
]
ODD = [
    ("version", ..., "version: expected 1, which this release reads, but found None"),
    ("version", 3, "but found 3; if a later release wrote it, upgrade dataload; if the shards are right, delete"),
    ("data_sets", ..., "manifest: expected the key 'data_sets' but found only version"),
    ("extra", 1, "manifest: unknown key extra: choose from data_sets, version"),
    (f"{FIRST}.recods", 5, "data set: unknown key recods: did you mean 'records'?"),
    (f"{FIRST}.fields.x.classes", [3], "fields.x.classes: expected texts but found 3"),
    (f"{FIRST}.options.index", "/etc/passwd", "options: expected one of case_sensitive, codec, "),
    (f"{COLUMNS}.name", ..., "shards: expected the key 'name' but found only records, bytes, etag, sha256"),
    (f"{COLUMNS}.name.1", "t-0.syr", "the shard t-0.syr is listed twice"),
    (f"{COLUMNS}.bytes.0", (1 << 63) - 1, "shards.bytes: expected a sum of at most 9223372036854775807 but found"),
    (f"{COLUMNS}." + "x\x1b" * 99, 0, "shards: unknown key x\\x1bx\\x1b"),
    (
        COLUMNS,
        {"name": [], "records": [], "bytes": [], "etag": None, "sha256": None},
        "shards: expected at least one shard but found none",
    ),
    *((f"{COLUMNS}.identity", [wrong, None], f"shards.identity: {IDENTITY} but found ") for wrong in NO_IDENTITIES),
    *(
        (f"{COLUMNS}.{name}", column, f"shards.{name}: expected 2 values, one for each name, but found {count} values")
        for name, column, count in (("records", [10], 1), ("sha256", [], 0), ("identity", [[1, "a", None]], 1))
    ),
]


def shown(value):
    return (value if isinstance(value, str) else repr(value)).encode("unicode_escape").decode()[:40]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [*((path, value, f"{said} but found {shown(value)}") for path, said, values in UNFIT for value in values), *ODD],
)
def test_what_is_refused(path, value, message):
    with pytest.raises(CorruptFileError) as caught:
        Manifest.parse(json.dumps(changed(json.loads(TEXT), path, value)).encode(), "d/dataload.json")
    text = str(caught.value)
    assert text.startswith("d/dataload.json: not a valid manifest: ")
    assert message in text
    assert text.endswith("; if the shards are right, delete dataload.json and run `dataload index --manifest` again")
    assert len(text) < 700


ONE, TWICE = ({"a" * n: FieldStatistics(records=1)} for n in (1, 2))
MANY = merge_fields({str(n): FieldStatistics(records=1) for n in range(999)}, ONE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Manifest.parse(bytes(MOST_BYTES + 1), "m"), "m: a manifest has at most 33,554,432"),
        (lambda: Manifest((entry(), entry())), "two data sets have the pattern t-{0..1}.syr"),
        (lambda: Manifest((entry(), entry(SHARDS[1:], pattern="x"))), "the shard t-1.syr is listed twice"),
        (lambda: merge_fields(MANY, TWICE), "the records have more than 1,000 different fields: name those"),
    ],
)
def test_what_contradicts_itself_or_is_too_large(make, message):
    with pytest.raises((ConfigError, CorruptFileError), match=re.escape(message)):
        make()


def test_stale_shards():
    found = {"t-0.syr": (1000, '"e0"'), "t-1.syr": (900, '"x"')}  # the manifest does not know the second ETag
    for changes, lines in (
        ({}, []),
        ({"t-0.syr": (1000, None)}, []),
        ({"t-0.syr": (1001, '"e0"')}, ["t-0.syr has 1,001 bytes, and 1,000 in the manifest"]),
        ({"t-0.syr": (1000, '"e1"')}, ['t-0.syr has the ETag "e1", and "e0" in the manifest']),
    ):
        looks = {name: Found(size, Evidence(0, tag)) for name, (size, tag) in {**found, **changes}.items()}
        assert list(entry().stale(looks)) == lines


def test_a_data_set_takes_the_place_of_those_that_share_a_shard():
    manifest = Manifest((entry(), OTHER))
    wider = entry([*SHARDS, ShardFacts("t-2.syr", 1, 1)], pattern="t-{0..2}.syr")
    same_name = entry([ShardFacts("u.syr", 1, 1)])
    for new in (wider, same_name):
        assert manifest.with_data_set(new).data_sets == (new, OTHER)
    assert Manifest().with_data_set(OTHER).with_data_set(entry()) == manifest
    plain = DataSetFacts.of("a.syr", "syrah", [ShardFacts("a.syr", 10, 1, "a" * 64)])
    known = replace(plain, statistics={}, made_by=MapEntry("module:function", "", "a" * 64, ""))
    assert Manifest((known,)).with_data_set(plain).data_sets == (known,), "what is known of the same shards stays"
    other = replace(plain, sha256=("b" * 64,))
    assert Manifest((known,)).with_data_set(other).data_sets == (other,)


def test_10_000_shards_take_few_bytes():
    shards = [
        ShardFacts(f"train-{i:05d}.tar", 10**8 + i, i, f"{i:064x}", evidence=Evidence(0, f'"{i:032x}"'))
        for i in range(10_000)
    ]
    data = Manifest((entry(shards),)).to_bytes()
    assert len(data) < 1_500_000
    assert Manifest.parse(data, "m").data_sets[0].shards == tuple(shards)


FILE = LengthsFile.of(138, "ab" * 32)


def statistics():
    fields = measure(MemorySource([{"x": np.arange(n, dtype=np.float32), "label": n % 2} for n in (1, 2, 3)])).fields
    return DataSetStatistics(options={"codec": "msgpack"}, selected=("x", "label"), fields=fields, lengths={"x": FILE})


def test_statistics_are_read_as_they_were_written():
    assert DataSetStatistics.parse(statistics().to_json()) == statistics()
    with pytest.raises(ConfigError, match="statistics: expected the key 'options' but found only fields"):
        DataSetStatistics.parse({"fields": {}})


MAY_SET = "expected an option that a manifest may set"
LENGTHS = "the name, the size and the SHA-256 of a file of lengths"
SHAPES = "fields.x.shapes"
INTEGERS = "different integers or short texts"
ASCENDING = "expected two ascending numbers, minimum and maximum, but found"
FRACTION = "expected an integer, or a fraction of one and a power of two"


@pytest.mark.parametrize(
    ("path", "message", "values"),
    [
        ("more", "statistics: unknown key more", [1]),
        ("options", f"statistics.options.codec: {MAY_SET}", [{"codec": "os:system"}]),
        ("options", f"statistics.options.index: {MAY_SET}", [{"index": "/etc"}]),
        ("selected", "statistics.selected: expected names of fields, or null but found [1]", [[1]]),
        ("fields", "statistics.fields: expected at most 1000 fields", [{str(n): {} for n in range(1001)}]),
        ("lengths.y", "statistics.lengths: expected only names of fields but found y", [list(FILE)]),
        ("lengths.x", LENGTHS, [["../x.npy", 138, "ab" * 32], [FILE.name, -1, "ab" * 32], [FILE.name, 138, "a"]]),
        ("fields.x.records", "fields.x.records: expected an integer from 0 to", [-1]),
        ("fields.x.dtypes", "fields.x.dtypes: expected numbers with the sum 3", [{"float32": 2}]),
        (SHAPES, "at most 1000 values with a number each", [{"shape": [[1]], "records": []}]),
        (SHAPES, "shapes.records: expected numbers with the sum", [{"shape": [[1]], "records": [2]}]),
        (SHAPES, "different shapes of up to 64 axes", [{"shape": [[1], [1]], "records": [1, 2]}]),
        ("fields.x.axes", "fields.x.axes: expected the ends of up to 64 axes but found [[3, 1]]", [[[3, 1]]]),
        ("fields.x.length", "expected the shortest length, the longest, and the sum of 3", [[1, 3, 10]]),
        ("fields.label.labels", INTEGERS, [{"value": [1, each], "records": [1, 2]} for each in ("1" * 65, True)]),
        ("fields.label.labels", INTEGERS, [{"value": [1 << 64], "records": [3]}]),
        ("fields.x.numbers.nan", "fields.x.numbers.nan: expected an integer from 0", [1.5]),
        ("fields.x.numbers.minimum", ASCENDING, [5]),
        ("fields.x.numbers.maximum", ASCENDING, [float("nan")]),
        ("fields.x.numbers.total", f"fields.x.numbers.total: {FRACTION}", [None, "1e999999999"]),
        ("fields.x.numbers.squares", FRACTION, ["1/3", "1/0"]),
    ],
)
def test_statistics_that_are_impossible(path, message, values):
    for value in values:
        with pytest.raises(ConfigError, match=re.escape(message)):
            DataSetStatistics.parse(changed(statistics().to_json(), path, value))
