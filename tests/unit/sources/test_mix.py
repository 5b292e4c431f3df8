"""Several sources as one."""

import re

import numpy as np
import pytest
from resumed import check_resume

import dataload
from dataload import ConfigError, Loader, RangeSource
from dataload.samplers import GlobalShuffle, Mixture, Sequential


def test_concat_takes_what_a_loader_takes():
    source = dataload.concat([RangeSource(3), {"index": np.arange(5)}, [{"index": 7}]])
    assert [int(record["index"]) for record in source] == [0, 1, 2, 0, 1, 2, 3, 4, 7]
    assert source.read_batch([8, 0])["index"].tolist() == [7, 0]


@pytest.fixture
def keyed_and_not(tmp_path):
    """The same records in a format with keys and one without."""
    records = [{"x": np.arange(i, i + 3), "y": np.array(i)} for i in range(40)]
    for name in ("a.tar", "b.syr"):
        with dataload.create(tmp_path / name) as writer:
            writer.extend(records)
    with dataload.open(tmp_path / "a.tar", decode="auto") as tar, dataload.open(tmp_path / "b.syr") as syrah:
        yield tar, syrah


@pytest.mark.parametrize("order", [1, -1])
def test_keys_are_left_out_unless_all_have_them(keyed_and_not, order):
    tar, syrah = keyed_and_not
    parts = [tar, syrah][::order]
    source = dataload.concat(parts)
    assert [*source.fields] == ["x", "y"]
    assert {*map(tuple, source.read([0, 79, 3]))} == {("x", "y")}
    batch = source.read_batch([0, 41, 79])
    assert [*batch] == ["x", "y"]
    assert batch["y"].tolist() == [0, 1, 39]
    with pytest.raises(ConfigError, match="has no field '__key__'"):
        source.read_batch([0, 79], ["__key__"])
    both = dataload.concat([tar, tar])
    assert both.read_batch([40])["__key__"] == [tar[0]["__key__"]]
    with Loader(dataload.mix([(parts[0], 1), (parts[1], 3)]), batch_size=20, shuffle=True, epochs=1) as loader:
        assert {tuple(batch) for batch in loader} == {("x", "y")}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("how", ["mapping", "pairs", "names"])
def test_a_mix_has_its_proportions(how, shuffle):
    a, b = RangeSource(1000), RangeSource(2000, start=1000)
    mixed = {
        "mapping": lambda: dataload.mix({a: 0.7, b: 0.3}),
        "pairs": lambda: dataload.mix([(a, 7), (b, np.float32(3))]),
        "names": lambda: dataload.mix({"a": a, "b": b}, {"b": 3, "a": 7}),
    }[how]()
    with Loader(mixed, batch_size=100, shuffle=shuffle, seed=4, epochs=1) as loader:
        first = np.concatenate([batch["index"] for batch in loader])
        assert len(loader) == 15  # until the first source would repeat
    assert (first[:1000] < 1000).sum() == 700
    assert sorted(first[first < 1000]) == [*range(1000)]
    assert (np.diff(first[first < 1000]) == 1).all() == (not shuffle)


def test_the_order_of_a_mix_is_a_mixture():
    mixed = dataload.mix({RangeSource(5): 1, RangeSource(7): 2}, stop="longest")
    order = Loader(mixed, batch_size=2, seed=3).batch_sampler.order
    assert order == Mixture((Sequential(5), Sequential(7)), (1, 2), "longest", 3, lengths=(5, 7))
    parts = Loader(mixed, batch_size=2, shuffle="global", seed=3).batch_sampler.order.samplers
    assert [type(part) for part in parts] == [GlobalShuffle, GlobalShuffle]
    assert len({part.seed for part in parts} | {3}) == 3  # equal parts are not shuffled alike
    assert repr(mixed) == "MixedSource(2 sources, weights=(1.0, 2.0))"
    chosen = Loader(mixed, batch_size=2, sampler=Sequential(12)).batch_sampler.order
    assert chosen == Sequential(12)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_a_mix_resumes(workers):
    def loader():
        mixed = dataload.mix({RangeSource(50): 0.5, RangeSource(80, start=50): 0.5})
        return Loader(mixed, batch_size=7, shuffle=True, seed=1, num_workers=workers, epochs=2)

    check_resume(loader, "index", 5, epochs=2)


A, B = RangeSource(3), RangeSource(4)


TAKES = "mix takes sources with weights, {a: 0.7, b: 0.3} or [(a, 0.7), (b, 0.3)], got "
NESTED = "a mix inside of another source has no proportions"
PART = "a part of a mix has no proportions: slice, filter or split the sources"
MIXED = dataload.mix({A: 1, B: 1})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dataload.mix([A, B]), ConfigError, f"{TAKES}list"),
        (lambda: dataload.mix({}), ConfigError, f"{TAKES}dict of 0"),
        (lambda: dataload.mix(A), ConfigError, "got RangeSource(3, start=0, step=1)"),
        (lambda: dataload.mix({A: -1, B: 1}), ConfigError, "weights must be numbers from 0, got -1"),
        (lambda: dataload.mix({A: "1", B: 1}), ConfigError, "weights must be numbers from 0, got '1'"),
        (lambda: dataload.mix({A: float("inf")}), ConfigError, "weights must be numbers from 0, got inf"),
        (lambda: dataload.mix({A: 0, B: 0}), ConfigError, "weights must hold a number above 0, got [0, 0]"),
        (lambda: dataload.mix({"a": A}, {"b": 1}), ConfigError, "weights by name go with sources of the same names"),
        (lambda: dataload.mix([A], {"b": 1}), ConfigError, "weights by name go with sources of the same names"),
        (lambda: dataload.mix({"a.tar": 1}), TypeError, "a path is no source: pass dataload.open('a.tar')"),
        (lambda: dataload.mix([(MIXED, 1)]), TypeError, NESTED),
        (lambda: dataload.mix({A: 1}, stop="last"), ConfigError, "stop is 'last': Known: first, longest, never"),
        (lambda: MIXED[:2], TypeError, PART),
        (lambda: MIXED.filter(bool), TypeError, PART),
        (lambda: MIXED.split(0.5), TypeError, PART),
        (lambda: dataload.windows(MIXED, [7], 2), TypeError, NESTED),
        (lambda: dataload.concat(A), TypeError, "concat takes a list of sources, got RangeSource(3"),
        (lambda: dataload.concat([]), ConfigError, "a ConcatSource needs at least one source, got none"),
    ],
)
def test_what_mixes_and_concatenations_refuse(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
    assert MIXED[3] == {"index": 0}
