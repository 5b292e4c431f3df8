"""The base of sources, slices, ranges, and several sources as one."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dataload
from dataload import ConfigError, Loader, MemorySource, RangeSource
from dataload.catalog.facts import select_fields
from dataload.errors import ClosedSourceError
from dataload.samplers import GlobalShuffle, Mixture, Sequential
from dataload.sources import ConcatSource
from dataload.sources.base import SliceSource, Source
from dataload.sources.prefetch import shared_steps, steps_within
from dataload.types import FieldSpec, StepsAhead


class Letters(Source):
    """The least that a backend has to write."""

    text = "abcdefghij"
    closed = False

    def __len__(self):
        return len(self.text)

    def _read(self, indices):
        if self.closed:
            raise ClosedSourceError("closed")
        return [{"letter": self.text[index], "n": int(index)} for index in indices]

    def fingerprint(self):
        return "letters"

    def close(self):
        self.closed = True

    def __repr__(self):
        return "Letters()"


SOURCE = Letters()
RECORDS = SOURCE.read(range(10))


@given(st.lists(st.slices(14), min_size=1, max_size=3))
def test_a_slice_is_the_slice_of_a_list(slices):
    part, expected = SOURCE, RECORDS
    for where in slices:
        part, expected = part[where], expected[where]
        assert isinstance(part, SliceSource)
        assert len(part) == sum(part.shard_lengths) == len(expected)
        assert list(part) == part.read(range(len(part))) == expected
        assert [part[index] for index in range(len(part))] == expected
        assert min(part.shard_lengths) >= 0


def test_a_slice():
    batch = SOURCE[2:9:2].read_batch([3, 0, -1], fields=["n"])
    assert {name: column.tolist() for name, column in batch.items()} == {"n": [8, 2, 8]}
    for index, read in ((3, SOURCE[2:5].__getitem__), (-4, lambda index: SOURCE[2:5].read([0, index]))):
        with pytest.raises(IndexError, match=f"index {index} is out of range for 3 records"):
            read(index)
    texts = {SOURCE[2:5]: "Letters()[2:5]", SOURCE[::-2]: "Letters()[9:-1:-2]", SOURCE[1:][:3]: "Letters()[1:10][0:3]"}
    assert [*map(repr, texts)] == [*texts.values()]
    parts = [SOURCE, SOURCE[:], SOURCE[1:], SOURCE[:-1], SOURCE[::2], SOURCE[1:][1:]]
    assert len({part.fingerprint() for part in parts}) == len(parts)
    assert SOURCE[1:5].fingerprint() == Letters()[1:5].fingerprint()
    assert MemorySource({"x": np.zeros((4, 2))})[1:3].fields == {"x": FieldSpec("float64", (2,))}
    source = Letters()
    with source[2:4]:
        pass
    with pytest.raises(ClosedSourceError):
        source[0]


def test_iteration_reads_in_blocks():
    asked = []

    class Recorded(RangeSource):
        def _read(self, indices):
            asked.append(len(indices))
            return super()._read(indices)

    assert [int(record["index"]) for record in Recorded(600)] == list(range(600))
    assert max(asked) < 600
    assert len(asked) < 10


@pytest.mark.parametrize("fields", [["index"], [], None])
def test_the_fields_of_a_range_can_be_named(fields):
    source, names = dataload.open("range:3", fields=fields), ["index"] if fields is None else fields
    assert ([*source.fields], source[2], [*source.read_batch([1])]) == (names, dict.fromkeys(names, 2), names)
    with pytest.raises(ConfigError, match="no field 'x'"):
        dataload.open("range:3", fields=["x"])


MIXED_FIELDS = ConcatSource([MemorySource([{"x": 1}]), MemorySource([{"y": 1}])])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SOURCE.read_batch([0], ["leter"]), "a record has no field 'leter': did you mean 'letter'?"),
        (lambda: select_fields(b"abc", ["x", "y"]), "are bytes, not fields: choose a codec to read fields x, y"),
        (lambda: RangeSource(9).read_batch([0], ["indx"]), "there is no field 'indx': did you mean 'index'?"),
        (lambda: RangeSource(5, step=0), "step must not be 0"),
        (lambda: MIXED_FIELDS.read_batch([1, 0]), "rows 0 and 1 have different fields (x, y only in one)"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        call()
    assert "step" not in message or caught.value.key == "step"
    assert MIXED_FIELDS.read_batch([1])["y"].tolist() == [1]


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


A, B = RangeSource(3), RangeSource(4)
TAKES = "mix takes sources with weights, {a: 0.7, b: 0.3} or [(a, 0.7), (b, 0.3)], got "
NESTED = "a mix inside of another source has no proportions"
PART = "a part of a mix has no proportions: slice, filter or split the sources"
BY_NAME = "weights are in pairs, mix([(a, 0.7), (b, 0.3)]), or by name"
EACH_NAME = "weights must hold one number for each name;"
MIXED = dataload.mix({A: 1, B: 1})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dataload.mix([A, B]), ConfigError, f"{TAKES}list"),
        (lambda: dataload.mix({}), ConfigError, f"{TAKES}dict of 0"),
        (lambda: dataload.mix(A), ConfigError, "got RangeSource(3, start=0, step=1)"),
        (lambda: dataload.mix({A: -1, B: 1}), ConfigError, "weights must be finite and not negative, got -1"),
        (lambda: dataload.mix({A: "1", B: 1}), ConfigError, "weights must be a list of one or more numbers"),
        (lambda: dataload.mix({A: float("inf")}), ConfigError, "weights must be finite and not negative, got inf"),
        (lambda: dataload.mix({A: 0, B: 0}), ConfigError, "weights must not all be zero"),
        (lambda: dataload.mix({A: True, B: 1}), ConfigError, "weights must be numbers, got [True, 1]"),
        (lambda: dataload.mix({"a": A}, {"b": 1, "a": 1}), ConfigError, f"{EACH_NAME} unknown: 'b'"),
        (
            lambda: dataload.mix(dict.fromkeys("abcde", A), {}),
            ConfigError,
            f"{EACH_NAME} missing: 'a', 'b', 'c' (and 2 more)",
        ),
        (lambda: dataload.mix({"a": A}), ConfigError, "sources by name need weights by name"),
        (lambda: dataload.mix([A], {"b": 1}), ConfigError, BY_NAME),
        (lambda: dataload.mix([A, B], [1, 2]), ConfigError, BY_NAME),
        (lambda: dataload.mix({"a.tar": 1}), TypeError, "a path is not a source: pass dataload.open('a.tar')"),
        (lambda: dataload.mix([(MIXED, 1)]), TypeError, NESTED),
        (lambda: dataload.mix({A: 1}, stop="last"), ConfigError, "stop is 'last': choose from first, longest, never"),
        (lambda: MIXED[:2], TypeError, PART),
        (lambda: MIXED[[0, 3]], TypeError, PART),
        (lambda: MIXED[np.arange(7) > 2], TypeError, PART),
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


def steps_of(blocks):
    for each in blocks:
        for start, stop in itertools.pairwise([0, *each.ends.tolist()]):
            yield each.epoch, each.indices[start:stop].tolist()


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.lists(st.lists(st.lists(st.integers(0, 1000), max_size=6), min_size=1, max_size=4), max_size=5),
    st.randoms(),
)
def test_each_part_sees_its_records_of_every_step(lengths, blocks, random):
    lengths[0] += 1
    ends = np.cumsum(lengths)
    blocks = [[[index % int(ends[-1]) for index in step] for step in steps] for steps in blocks]
    flat = [np.array([index for step in steps for index in step], np.int64) for steps in blocks]
    stops = [np.cumsum([len(step) for step in steps]) for steps in blocks]
    ahead = (StepsAhead(epoch, *each, len(each[1])) for epoch, each in enumerate(zip(flat, stops, strict=True)))
    copies = shared_steps(ahead, len(ends))
    spans = itertools.pairwise([0, *ends.tolist()])
    iterators = {part: steps_within(copy, *span) for part, (copy, span) in enumerate(zip(copies, spans, strict=True))}
    found = {part: [] for part in iterators}
    while iterators:  # in any order
        part = random.choice([*iterators])
        try:
            found[part].append(next(iterators[part]))
        except StopIteration:
            del iterators[part]
    for part, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        assert [*steps_of(found[part])] == [
            (epoch, [index - start for index in step if start <= index < end])
            for epoch, steps in enumerate(blocks)
            for step in steps
        ]
