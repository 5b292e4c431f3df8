"""What the errors of a config say. Each line is an override and the message that it leads to; * stands for any text."""

import re

import numpy as np
import pytest

import dataload
from dataload.config import read_config
from dataload.errors import ConfigError

ONE = {"path": "range:9"}
TWO = [{"path": "range:4"}, {"path": "range:5"}]

ONE_SOURCE = """
loader.batch_sise=1 => loader.batch_sise is 1: there is no such key, did you mean 'batch_size'? Choose *
lodaer.seed=1 => lodaer is ['seed']: there is no such key, did you mean 'loader'? Choose from loader, remote, *
batch_size=1 => batch_size is 1: there is no such key, did you mean 'loader.batch_size'? Choose from loader, *
loader.codec=npz => loader.codec is 'npz': there is no such key, did you mean 'source.codec'? Choose from batch_size, *
loader.zzz=1 => loader.zzz is 1: there is no such key: choose from batch_size, *
loader.batch_size=0 => loader.batch_size is 0: expected a number >= 1
loader.batch_size=true => loader.batch_size is true: expected a whole number
loader.batch_size=null => loader.batch_size: give batch_size, global_batch_size or a sampler that makes batches
loader.shuffle=1 => loader.shuffle is 1: expected true or false or 'global' or 'shards'
loader.shuffle=shard => loader.shuffle is 'shard': did you mean 'shards'? Choose from global, shards, or true or false
loader.seed=a => loader.seed is 'a': expected a whole number
loader.timeout=0 => loader.timeout is 0: expected a number > 0
loader.tail=1 => loader.tail is 1: expected 'drop', 'pad' or 'partial'
loader.num_workers=-1 => loader.num_workers is -1: expected a number >= 0 or 'auto'
loader.transform=f => loader.transform is 'f': expected a function as 'package.module:function' or a list
loader.transform=[a:b, c] => loader.transform[1] is 'c': expected a function as 'package.module:function'
loader.collate=1 => loader.collate is 1: expected text or a table
loader.collate.x=padd => loader.collate.x is 'padd': did you mean 'pad'? Choose *
loader.rank=1 => loader.rank: rank and world_size go together: give both or neither
loader=1 => loader is 1: expected a table
source=null => source is missing: give a table with the path of the data
source=[] => source is []: expected a table or a list that is not empty
source=[3] => source[0] is 3: expected a table
source=[{path='a'}, {path=3}] => source[1].path is 3: expected text or a list
source=[{path='a'}, {}] => source[1].path is missing: expected a value
source=[{path='a', codek=1}] => source[0].codek is 1: there is no such key, did you mean 'codec'? Choose from *
source=[{path='a', batch_size=3}] => source[0].batch_size is 3: * mean 'loader.batch_size'? Choose from *cache, *
source.path=[a, 1] => source.path[1] is 1: expected text
source.shapes.x=[a] => source.shapes.x[0] is 'a': expected a whole number
source.index=true => source.index is true: expected text or a list or False
source.options.codec=npz => source.codec: format 'range' has no option 'codec': choose from start, step
sampler=1 => sampler is 1: expected a table
sampler.seed=1 => sampler.kind is missing: expected the kind of order
sampler.kind=globl_shuffle => sampler.kind is 'globl_shuffle': did you mean 'global_shuffle'? Choose *
sampler={kind='sequential', seed=1} => sampler.seed is 1: * did you mean 'loader.seed'? Choose from kind
sampler={kind='lanes', lanes=2, pool_size=0} => sampler.pool_size is 0: expected a number >= 1
sampler={kind='pool_shuffle', parent={kind='lanes'}} => sampler.parent.lanes is missing: expected a value
sampler={kind='repeat', times=2, parent=3} => sampler.parent is 3: expected a table
sampler={kind='repeat', times=2, parent={kind='packing'}} => sampler.parent.kind is 'packing': choose *
sampler={kind='repeat', times=2, parent={kind='sequential', times=3}} => *.times is 3: * mean 'sampler.times'? *
sampler={kind='weighted', weights=[1, -1]} => sampler.weights[1] is -1: expected a number >= 0
sampler={kind='weighted', weights='a.txt'} => * is 'a.txt': expected the path of a .npy file or a list
sampler.kind=subset => sampler.indices: give either indices, or some of start, stop and step
sampler={kind='subset', indices=[1], stop=0} => sampler.indices: give either indices, or some of start, stop and step
sampler={kind='subset', step=0} => sampler.step: selection must be a slice or *: slice step cannot be zero
sampler={kind='mixture', weights=[1, 2]} => sampler.weights: * one weight for each of the 1 samplers, got (1.0, 2.0)
sampler={kind='packing', row_length=4} => sampler.lengths: give either lengths, a .npy file, or length_of, the field *
sampler={kind='packing', row_length=4, lengths='a.npy'} => sampler.lengths: cannot read a.npy: No such file or directory
sampler={kind='packing', row_length=4, length_of='x', sampler={kind='subset'}} => sampler.sampler.indices: give either *
"""
TWO_SOURCES = """
sampler={kind='mixture', weights=[1, 2, 3]} => sampler.weights: * for each of the 2 samplers, got (1.0, 2.0, 3.0)
sampler={kind='mixture', weights=[1, 2, 3], length_of='index'} => sampler.weights: * got (1.0, 2.0, 3.0)
sampler={kind='mixture', weights={0=[1, 2], 9=[1]}} => sampler.weights: * one weight for each of the 2 *, got (1.0,)
sampler={kind='mixture', weights=[[1, 2], {0=[1, -2]}]} => sampler.weights[1].0[1] is -2: expected a number >= 0
sampler={kind='mixture', weights={a=1, b=2}} => sampler.weights: * the samplers have no names*
source[0].name=a => source[1].name: sources have different names, or none
sampler={kind='mixture', weights={a=[1, 2]}} => sampler.weights.a is [1, 2]: expected *
sampler={kind='mixture', weights=[[1, 2], [1]]} => sampler.weights: * one weight for each of the 2 samplers, got (1.0,)
sampler={kind='mixture', weights=[[1, 2], 1]} => sampler.weights: * a list of one or more numbers, got ((1.0, 2.0), 1.0)
sampler={kind='mixture', weights=[1, 'a']} => *[1] is 'a': expected a number or a table or a list
sampler={kind='mixture', weights=[[1, 'a']]} => sampler.weights[0][1] is 'a': expected a number
sampler={kind='mixture', weights=1} => * is 1: expected a table or a list
sampler={kind='mixture', weights={a=-1, b=2}} => sampler.weights.a is -1: expected a number >= 0
source[0].name='' => source[0].name is '': expected text that is not empty
sampler={kind='mixture', weights=[1, 1], samplers=[{kind='sequential'}]} => sampler.samplers: * of the 2 sources, got 1
sampler={kind='mixture', weights=[1, 1], samplers=1} => sampler.samplers is 1: expected a list
sampler={kind='mixture', weights=[1, 1], samplers=[{kind='sequential'}, {kind='subset'}]} => *[1].indices: *
sampler={kind='mixture', weights=[1,1], samplers=[{kind='mixture',weights=[1,2]}, {kind='sequential'}]} => *[0].weights*
"""


def lines(table):
    return [line.split(" => ") for line in table.strip().split("\n")]


@pytest.mark.parametrize(
    ("source", "override", "message"),
    [(ONE, *line) for line in lines(ONE_SOURCE)] + [(TWO, *line) for line in lines(TWO_SOURCES)],
)
def test_one_thing_is_wrong(source, override, message):
    with pytest.raises(ConfigError) as caught:
        dataload.from_config({"source": source, "loader": {"batch_size": 4}}, overrides=[override])
    pattern = re.escape(message).replace(r"\*", ".*")
    assert re.fullmatch(pattern, str(caught.value).removeprefix("config: ")), caught.value


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["loader.shuffle=true", "sampler.kind=sequential"], "loader.shuffle", "shuffle and sampler both choose"),
        (["loader.rank=2", "loader.world_size=2"], "loader.rank", r"rank must be an integer in \[0, 2\), got 2"),
        (["loader.global_batch_size=8"], "loader.global_batch_size", "is for one rank and global_batch_size for all"),
        (
            ["sampler={kind='length_buckets', max_tokens=8, lengths='LENGTHS'}"],
            "sampler.max_tokens",
            "give either max_tokens or batch_size, got 8 and 4",
        ),
        (
            ["sampler={kind='length_buckets', lengths='LENGTHS'}", "loader.batch_size=null"],
            "sampler.max_tokens",
            "give either max_tokens or batch_size, got None and None",
        ),
        (
            ["sampler={kind='packing', row_length=9, lengths='LENGTHS'}", "loader.batch_size=null"],
            "loader.batch_size",
            "batch_size must be an integer >= 1, got None",
        ),
        (["sampler={kind='streams', shards=true}", "loader.batch_size=null"], "loader.batch_size", "an integer >= 1"),
    ],
)
def test_settings_that_contradict_each_other_are_an_error_of_the_loader(tmp_path, overrides, key, message):
    np.save(tmp_path / "lengths.npy", np.arange(9))
    overrides = [override.replace("LENGTHS", str(tmp_path / "lengths.npy")) for override in overrides]
    with pytest.raises(ConfigError, match=f"^{re.escape(key)}: .*{message}") as caught:
        dataload.from_config({"source": ONE, "loader": {"batch_size": 4}}, overrides=overrides)
    assert caught.value.key == key


def test_everything_is_said_at_once_and_long_values_are_shortened():
    sampler = {"kind": "lanes", "parent": {"kind": "lanes", "lanes": 0, "x": 1}, "weights": [float("nan")]}
    with pytest.raises(ConfigError) as caught:
        read_config({"source": [{}], "sampler": sampler, "loader": {"tail": "drp", "shufle": True}})
    first, *rest = str(caught.value).split("\n  ")
    assert first == "config has 7 errors:"
    assert [line.partition(" is ")[0] for line in rest] == [
        *("source[0].path", "sampler.lanes", "sampler.parent.lanes", "sampler.parent.x", "sampler.weights"),
        *("loader.tail", "loader.shufle"),
    ]
    assert (caught.value.key, caught.value.value) == ("source[0].path", None)
    assert caught.value.__cause__ is None
    assert "pydantic" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"is 'xxx.*\.\.\.: expected a whole number$") as caught:
        read_config({"source": ONE, "loader": {"batch_size": 4, "seed": "x" * 500}})
    assert len(str(caught.value)) < 150
