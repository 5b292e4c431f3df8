"""Any value anywhere in the lines of a log is accepted or drops its line, and what is accepted survives another log."""

import copy
import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from made_files import JSON

from dataload.catalog import ledger
from dataload.catalog.checks import ContentMark
from dataload.catalog.facts import Evidence, Measures, ShardFacts
from dataload.catalog.ledger import Job, parse_log, shard_line
from dataload.catalog.statistics import DataSetStatistics
from dataload.convert.measuring import measure
from dataload.sources.memory import MemorySource

JOB = Job("run", "plan")
FOUND = measure(MemorySource([{"x": np.arange(n, dtype=np.float32), "label": n % 2, "t": "a" * n} for n in (1, 2, 3)]))
WHOLE = ShardFacts(
    "a-0.syr",
    10,
    3,
    "ab" * 32,
    ContentMark(10, "cd", ["e"]),
    Evidence(17, '"f"'),
    4,
    Measures(FOUND.fields, FOUND.lengths),
)
LINE = json.loads(shard_line(WHOLE, "key").partition(b" ")[2])


def places(value, path=()):
    """Yield the path of each value in another one."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*path, key))


@given(st.sampled_from([*places(LINE)]), JSON)
def test_any_value_anywhere(place, value):
    table = {"line": copy.deepcopy(LINE)}
    inside, last = table, "line"
    for key in place:
        inside, last = inside[last], key
    inside[last] = value
    data = ledger.header_line(JOB) + ledger._line(table["line"]) + shard_line(ShardFacts("b", 1, 1), "")
    found = parse_log(data, JOB)
    assert found.shards["b", ""] == ShardFacts("b", 1, 1), "other lines count"
    assert len(found.shards) + found.damaged == 2
    again = parse_log(ledger.header_line(JOB) + b"".join(shard_line(f, k) for (_, k), f in found.shards.items()), JOB)
    assert again.shards == found.shards
    for facts in found.shards.values():
        if facts.measures is not None:
            DataSetStatistics(options={}, selected=None, fields=facts.measures.fields).to_json()
