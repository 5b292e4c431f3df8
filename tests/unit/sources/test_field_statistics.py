"""Statistics in a manifest, which comes with the data and is not trusted."""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest

from dataload.convert.measuring import measure
from dataload.errors import ConfigError
from dataload.sources.field_statistics import (
    DataSetStatistics,
    FieldStatistics,
    LengthsFile,
    Numbers,
    merge_fields,
)
from dataload.sources.manifest import DataSetEntry, Manifest, ShardEntry, merge_manifests
from dataload.sources.manifest_checks import MapEntry
from dataload.sources.memory import MemorySource

FILE = LengthsFile.of(138, "ab" * 32)


def statistics():
    records = [{"x": np.arange(n, dtype=np.float32), "label": n % 2} for n in (1, 2, 3)]
    fields = measure(MemorySource(records)).fields
    return DataSetStatistics(options={"codec": "msgpack"}, selected=("x", "label"), fields=fields, lengths={"x": FILE})


def test_what_is_written_is_what_is_read():
    assert DataSetStatistics.parse(statistics().to_json()) == statistics()


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        ((), {"fields": {}}, "statistics: expected the key 'options' but found only fields"),
        (("more",), 1, "statistics: unknown key more"),
        (("options",), {"codec": "os:system"}, "statistics.options.codec: expected an option that a manifest may set"),
        (("options",), {"index": "/etc"}, "statistics.options.index: expected an option that a manifest may set"),
        (("selected",), [1], "statistics.selected: expected names of fields, or null but found [1]"),
        (("fields",), {str(n): {} for n in range(1001)}, "statistics.fields: expected at most 1000 fields"),
        (("lengths", "y"), list(FILE), "statistics.lengths: expected only names of fields but found y"),
        (("lengths", "x"), ["../x.npy", 138, "ab" * 32], "the name, the size and the SHA-256 of a file of lengths"),
        (("lengths", "x"), [FILE.name, -1, "ab" * 32], "the name, the size and the SHA-256 of a file of lengths"),
        (("lengths", "x"), [FILE.name, 138, "a"], "the name, the size and the SHA-256 of a file of lengths"),
        (("fields", "x", "records"), -1, "fields.x.records: expected an integer from 0 to"),
        (("fields", "x", "dtypes"), {"float32": 2}, "fields.x.dtypes: expected numbers with the sum 3"),
        (("fields", "x", "shapes"), {"shape": [[1]], "records": []}, "at most 1000 values with a number each"),
        (("fields", "x", "shapes"), {"shape": [[1]], "records": [2]}, "shapes.records: expected numbers with the sum"),
        (("fields", "x", "shapes"), {"shape": [[1], [1]], "records": [1, 2]}, "different shapes of up to 64 axes"),
        (("fields", "x", "axes"), [[3, 1]], "fields.x.axes: expected the ends of up to 64 axes but found [[3, 1]]"),
        (("fields", "x", "length"), [1, 3, 10], "expected the shortest length, the longest, and the sum of 3"),
        (("fields", "label", "labels"), {"value": [1, "1" * 65], "records": [1, 2]}, "different integers or short tex"),
        (("fields", "label", "labels"), {"value": [1, True], "records": [1, 2]}, "different integers or short texts"),
        (("fields", "label", "labels"), {"value": [1 << 64], "records": [3]}, "different integers or short texts"),
        (("fields", "x", "numbers", "nan"), 1.5, "fields.x.numbers.nan: expected an integer from 0"),
        (("fields", "x", "numbers", "minimum"), 5, "expected two ascending numbers, minimum and maximum, but found"),
        (("fields", "x", "numbers", "maximum"), float("nan"), "expected two ascending numbers, minimum and maximum,"),
        (("fields", "x", "numbers", "total"), None, "numbers.total: expected an integer, or a fraction of one and"),
        (("fields", "x", "numbers", "total"), "1e999999999", "expected an integer, or a fraction of one and a power o"),
        (("fields", "x", "numbers", "squares"), "1/3", "expected an integer, or a fraction of one and a power of two"),
        (("fields", "x", "numbers", "squares"), "1/0", "expected an integer, or a fraction of one and a power of two"),
    ],
)
def test_impossible_values(keys, value, message):
    table = copy.deepcopy(statistics().to_json())
    if keys:
        inner = table
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
    with pytest.raises(ConfigError, match=re.escape(message)):
        DataSetStatistics.parse(table if keys else value)


def test_what_is_too_much_is_left_out(monkeypatch):
    monkeypatch.setattr("dataload.sources.field_statistics.MOST_LABELS", 1000)
    ids = measure(MemorySource([{"id": np.array(i), "x": np.zeros(i)} for i in range(1500)])).fields
    assert ids["id"].labels is None
    assert ids["x"].shapes is None
    assert ids["x"].axes == ((0, 1499),)
    one, other = ({"a" * n: FieldStatistics(records=1)} for n in (1, 2))
    fields = {str(n): FieldStatistics(records=1) for n in range(999)}
    assert len(merge_fields(fields, one)) == 1000
    with pytest.raises(ConfigError, match="the records have more than 1,000 different fields: name those"):
        merge_fields(merge_fields(fields, one), other)


def test_parts_that_were_not_run_alike():
    with pytest.raises(ConfigError, match=r"parts disagree about the fields of their statistics: None, \('x',\): run"):
        DataSetStatistics(options={}, selected=None, fields={}).merge(
            DataSetStatistics(options={}, selected=("x",), fields={})
        )


def test_parts_that_overlap():
    kept = DataSetStatistics(options={}, selected=None, fields={}).to_json()
    shards = [ShardEntry(f"{n}.syr", 1, 10) for n in range(3)]
    one, other = (
        Manifest((replace(DataSetEntry.of("*.syr", "syrah", part), statistics=kept),))
        for part in (shards[:2], shards[1:])
    )
    assert merge_manifests([one, one]) == one
    with pytest.raises(ConfigError, match=r"two parts have statistics of the shard 1\.syr"):
        merge_manifests([one, other])


def test_what_is_known_of_shards_stays():
    shards = [ShardEntry("a.syr", 1, 10, sha256="a" * 64)]
    plain = DataSetEntry.of("a.syr", "syrah", shards)
    known = replace(plain, statistics={}, map=MapEntry("module:function", "", "a" * 64, ""))
    assert Manifest((known,)).with_data_set(plain).data_sets == (known,)
    other = replace(plain, sha256=("b" * 64,))
    assert Manifest((known,)).with_data_set(other).data_sets == (other,)


def test_mean_and_deviation():
    numbers = measure(MemorySource([{"x": np.array([1.0, 3.0, np.nan, np.inf])}])).fields["x"].numbers
    assert (numbers.mean, numbers.std, numbers.nan, numbers.infinite) == (2, 1, 1, 1)
    assert Numbers().mean is None
    huge = measure(MemorySource([{"x": np.array([1e300, -1e300])}])).fields["x"].numbers
    assert (huge.mean, huge.std, huge.maximum) == (0, None, 1e300)
