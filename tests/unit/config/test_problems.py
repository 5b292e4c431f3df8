"""What the errors of a config say. Each line is an override and the message that it leads to; * stands for any text."""

from __future__ import annotations

import re

import pytest

from dataload.config import read_config
from dataload.errors import ConfigError

ONE = {"path": "a.syr"}
TWO = [{"path": "a.syr"}, {"path": "b.syr"}]

ONE_SOURCE = """
loader.batch_sise=1 => loader.batch_sise is 1: there is no such key, did you mean 'batch_size'? Known: batch_size, *
lodaer.seed=1 => lodaer is ['seed']: there is no such key, did you mean 'loader'? Known: loader, remote, *
batch_size=1 => batch_size is 1: there is no such key, did you mean 'loader.batch_size'? Known: loader, *
loader.codec=npz => loader.codec is 'npz': there is no such key, did you mean 'source.codec'? Known: batch_size, *
loader.zzz=1 => loader.zzz is 1: there is no such key. Known: batch_size, *
loader.batch_size=0 => loader.batch_size is 0: expected a whole number >= 1
loader.batch_size=true => loader.batch_size is true: expected a whole number >= 1
loader.batch_size=null => loader.batch_size is missing: expected a whole number >= 1
loader.shuffle=1 => loader.shuffle is 1: expected true or false or 'global' or 'shards'
loader.shuffle=shard => loader.shuffle is 'shard': did you mean 'shards'? Known: global, shards, or true or false
loader.seed=a => loader.seed is 'a': expected a whole number
loader.timeout=0 => loader.timeout is 0: expected a number > 0
loader.tail=1 => loader.tail is 1: expected 'drop' or 'pad' or 'partial'
loader.num_workers=-1 => loader.num_workers is -1: expected a whole number >= 0 or 'auto'
loader.transform=f => loader.transform is 'f': expected a function as 'package.module:function' or a list of functions
loader.transform=[a:b, c] => loader.transform[1] is 'c': expected a function as 'package.module:function'
loader.collate=1 => loader.collate is 1: expected a function as 'package.module:function' or a table
loader.collate.x=padd => loader.collate.x is 'padd': did you mean 'pad'? Known: list, pad, ragged, stack, or a table
loader.rank=1 => loader.rank is 1: rank and world_size go together: give both or none
loader=1 => loader is 1: expected a table
source=null => source is missing: expected a table or a list of tables, at least one
source=[] => source is []: expected a table or a list of tables, at least one
source=[3] => source[0] is 3: expected a table
source=[{path='a'}, {path=3}] => source[1].path is 3: expected text or a list of text, at least one
source=[{path='a'}, {}] => source[1].path is missing: expected text or a list of text, at least one
source=[{path='a', codek=1}] => source[0].codek is 1: there is no such key, did you mean 'codec'? Known: *
source=[{path='a', batch_size=3}] => source[0].batch_size is 3: * mean 'loader.batch_size'? Known: *cache, *
source.path=[a, 1] => source.path[1] is 1: expected text
source.shapes.x=[a] => source.shapes.x[0] is 'a': expected a whole number
source.index=true => source.index is true: expected text or a list of text, at least one or false
source.options.codec=npz => source.options.codec is 'npz': belongs one level up: source.codec
sampler=1 => sampler is 1: expected a table
sampler.seed=1 => sampler.kind is missing: expected 'sequential' or 'global_shuffle' or *
sampler.kind=globl_shuffle => sampler.kind is 'globl_shuffle': did you mean 'global_shuffle'? Known: global_shuffle, *
sampler={kind='sequential', seed=1} => sampler.seed is 1: * did you mean 'loader.seed'? Known: kind
sampler={kind='lanes', lanes=2, pool_size=0} => sampler.pool_size is 0: expected a whole number >= 1
sampler={kind='pool_shuffle', parent={kind='lanes'}} => sampler.parent.lanes is missing: expected a whole number >= 1
sampler={kind='repeat', times=2, parent=3} => sampler.parent is 3: expected a table
sampler={kind='repeat', times=2, parent={kind='packing'}} => sampler.parent.kind is 'packing': Known: global_shuffle, *
sampler={kind='repeat', times=2, parent={kind='sequential', times=3}} => *.times is 3: * mean 'sampler.times'? *
sampler={kind='weighted', weights=[1, -1]} => sampler.weights[1] is -1: expected a number >= 0
sampler={kind='weighted', weights='a.txt'} => * is 'a.txt': expected the path of a .npy file or a list of numbers, at *
sampler.kind=subset => sampler.indices is missing: expected indices, or one of start, stop and step
sampler={kind='subset', indices=[1], stop=0} => sampler.stop is 0: conflicts with indices: remove one of them
sampler={kind='subset', step=0} => sampler.step is 0: expected a whole number other than 0
sampler={kind='mixture', weights=[1]} => sampler.kind is 'mixture': it mixes several sources, each a table [[source]]; *
sampler={kind='global_shuffle', parent={kind='mixture', weights=[1]}} => sampler.parent.kind is 'mixture': it mixes *
sampler={kind='packing', row_length=4} => sampler.lengths is missing: expected a .npy file, or length_of, the field *
sampler={kind='packing', row_length=4, lengths='a.npy', length_of='x'} => sampler.length_of is 'x': conflicts with *
sampler={kind='packing', row_length=4, length_of='x', sampler={kind='subset'}} => sampler.sampler.indices is missing: *
sampler={kind='length_buckets', max_tokens=8, length_of='x'} => loader.batch_size is 4: conflicts with sampler.max_tok*
"""
TWO_SOURCES = """
sampler={kind='mixture', weights=[1, 2, 3]} => sampler.weights is [1.0, 2.0, 3.0]: expected one for each of the 2 *
sampler={kind='mixture', weights={0=[1, 2], 9=[1]}} => sampler.weights.9 is [1.0]: expected one for each of the 2 *
sampler={kind='mixture', weights=[[1, 2], {0=[1, -2]}]} => sampler.weights[1].0[1] is -2: expected a number >= 0
sampler={kind='mixture', weights={a=[1, 2]}} => sampler.weights.a is [1, 2]: expected *
sampler={kind='mixture', weights=[[1, 2], [1]]} => sampler.weights[1] is [1.0]: expected one for each of the 2 sources
sampler={kind='mixture', weights=[[1, 2], 1]} => sampler.weights[1] is 1.0: expected a list or a table, as for the *
sampler={kind='mixture', weights=[1, 'a']} => *[1] is 'a': expected a number >= 0 or a table or a list of *
sampler={kind='mixture', weights=[[1, 'a']]} => sampler.weights[0][1] is 'a': expected a number >= 0
sampler={kind='mixture', weights=1} => * is 1: expected a table or a list of numbers or tables or lists of numbers, at *
sampler={kind='mixture', weights=[1, 1], samplers=[{kind='sequential'}]} => * is ['sequential']: expected one for each *
sampler={kind='mixture', weights=[1, 1], samplers=1} => sampler.samplers is 1: expected a list of tables, at least one
sampler={kind='mixture', weights=[1, 1], samplers=[{kind='sequential'}, {kind='subset'}]} => *[1].indices is missing: *
sampler={kind='mixture', weights=[1, 1], samplers=[{kind='mixture', weights=[1]}, {kind='sequential'}]} => *[0].kind *
"""


def lines(table):
    return [line.split(" => ") for line in table.strip().split("\n")]


def matches(message, pattern):
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), message)


@pytest.mark.parametrize(
    ("source", "override", "message"),
    [(ONE, *line) for line in lines(ONE_SOURCE)] + [(TWO, *line) for line in lines(TWO_SOURCES)],
)
def test_one_thing_is_wrong(source, override, message):
    with pytest.raises(ConfigError) as caught:
        read_config({"source": source, "loader": {"batch_size": 4}}, [override])
    assert matches(str(caught.value), f"config: {message}"), caught.value


def test_contradictions():
    with pytest.raises(ConfigError) as caught:
        read_config({"source": ONE, "sampler": {"kind": "sequential"}, "loader": {"batch_size": 4, "shuffle": True}})
    assert (caught.value.key, caught.value.value) == ("loader.shuffle", True)
    overrides = ["sampler.kind=sequential", "loader.shuffle=true", "loader.rank=2", "loader.world_size=2"]
    with pytest.raises(ConfigError) as caught:
        read_config({"source": ONE, "loader": {"batch_size": 4}}, overrides)
    assert str(caught.value).split("\n  ") == [
        "config has 2 errors:",
        "loader.shuffle is true: conflicts with the section 'sampler', which chooses the order: remove one of them",
        "loader.rank is 2: expected a number below world_size, 2",
    ]
    with pytest.raises(ConfigError, match=r"loader\.global_batch_size is 8: conflicts with loader\.batch_size"):
        read_config({"source": ONE, "loader": {"batch_size": 4, "global_batch_size": 8}})


def test_everything_is_said_at_once():
    sampler = {"kind": "lanes", "parent": {"kind": "lanes", "lanes": 0, "x": 1}, "weights": [float("nan")]}
    with pytest.raises(ConfigError) as caught:
        read_config({"source": [{}], "sampler": sampler, "loader": {"tail": "drp", "shufle": True}})
    first, *rest = str(caught.value).split("\n  ")
    assert first == "config has 8 errors:"
    assert [line.partition(" is ")[0] for line in rest] == [
        *("source[0].path", "sampler.lanes", "sampler.parent.lanes", "sampler.parent.x", "sampler.weights"),
        *("loader.tail", "loader.shufle", "loader.batch_size"),
    ]
    assert (caught.value.key, caught.value.value) == ("source[0].path", None)
    assert caught.value.__cause__ is None
    assert "pydantic" not in str(caught.value)


def test_long_values_are_shortened():
    with pytest.raises(ConfigError, match=r"is 'xxx.*\.\.\.: expected a whole number$") as caught:
        read_config({"source": ONE, "loader": {"batch_size": 4, "seed": "x" * 500}})
    assert len(str(caught.value)) < 150


def test_weights_are_numbers():
    with pytest.raises(ConfigError, match=r"sampler\.weights\[0\] is nan: expected a number >= 0$"):
        read_config(
            {"source": ONE, "sampler": {"kind": "weighted", "weights": [float("nan")]}, "loader": {"batch_size": 4}}
        )


def test_who_says_how_many_rows_a_batch_has():
    table = {"kind": "length_buckets", "length_of": "x"}
    with pytest.raises(ConfigError, match=r"^config: loader\.batch_size is missing: give it, or sampler\.max_tokens$"):
        read_config({"source": ONE, "sampler": table, "loader": {"seed": 1}})
    settings = read_config({"source": ONE, "sampler": {**table, "max_tokens": 3}, "loader": {"seed": 1}})
    assert settings.loader.batch_size is None
