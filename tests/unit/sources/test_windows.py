"""Sequences: their lengths, beside itertools.groupby, and windows over them, compared with a loop over records."""

import itertools
import pickle
import re
from collections import namedtuple
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from made_files import pack, same

from dataload import ConfigError, MemorySource, RangeSource, windows
from dataload.collate import default_collate
from dataload.sources import ConcatSource
from dataload.sources.tar.reader import TarSource
from dataload.sources.views.adapt import as_source
from dataload.sources.views.sequences import record_lengths, sequence_lengths
from dataload.testing import check_source
from dataload.types import StepsAhead

Point = namedtuple("Point", "x y")
VALUES = {
    "int": lambda n: n,
    "text": lambda n: f"episode {n}",
    "bytes": lambda n: bytes([n]),
    "numbers": lambda n: np.array(n),
    "arrays": lambda n: np.array([[1.5, n], [0, 2]]),
    "arrays of different lengths": lambda n: np.zeros(n, np.int8),
    "one shape and different dtypes": lambda n: np.zeros(2, ("i4", "f4", "u4", "i8")[n]),
    "not a number": lambda n: np.array([n, np.nan]),
    "nothing": lambda n: np.zeros((n, 0)),
    "lists of nothing": lambda n: [None] * n,
    "tuples": lambda n: (n, "a"),
    "dicts": lambda n: {"x": n, "y": 0},
}


@pytest.mark.parametrize("kind", VALUES)
@given(numbers=st.lists(st.integers(0, 3), max_size=30), before=st.sampled_from([0, 0, 0, 1023, 1024]))
def test_runs_of_a_field(kind, numbers, before):
    numbers = [*[0] * before, *numbers]  # several blocks
    records = [{"episode": VALUES[kind](number), "x": index} for index, number in enumerate(numbers)]
    for source in (MemorySource(records), records, Batched(records)):
        got = sequence_lengths(source, field="episode")
        assert got.tolist() == [len(list(group)) for _, group in itertools.groupby(numbers)]
        assert got.dtype == np.int64


class Batched:
    """A source of someone's own, as torch's fetcher reads it."""

    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitems__(self, indices):
        assert all(type(index) is int for index in indices)
        return [self.records[index] for index in indices]


KEYS = ["ep_1/f-0001", "ep_1/f-0002", "ep_1/g-0003", "ep_2/g-0001", "ep_2/g-0007", "ep_10/g-0008"]


@pytest.fixture(params=[True, False], ids=["keys as a field", "keys of places"])
def keyed(request, tmp_path):
    """With ``fields=`` that leaves the key out, only `locate` tells it."""
    path = pack(tmp_path / "a.tar", [(f"{key}.{extension}", b"0") for key in KEYS for extension in ("cls", "jpg")])
    with TarSource(path, fields=None if request.param else ["jpg"]) as source:
        yield source


@pytest.mark.parametrize(
    ("key", "lengths"),
    [(True, [2, 1, 2, 1]), *((key, [3, 2, 1]) for key in (r"[^/]+", r"ep_(\d)")), (re.compile(r"/(.)-"), [2, 4])],
)
def test_keys(keyed, key, lengths):
    assert sequence_lengths(keyed, key=key).tolist() == lengths
    with pytest.raises(ConfigError, match=r"key 'ep_2/g-0001' of record 3 does not match 'ep_\(1\)\?"):
        sequence_lengths(keyed, key=r"ep_(1)?\d*")


@pytest.mark.parametrize(
    ("records", "options", "match"),
    [
        ([], {}, r"pass exactly one of field=, key= and shards=True, got none"),
        ([], {"field": "x", "key": True}, r"got field and key"),
        ([], {"key": "x", "shards": True}, r"got key and shards"),
        ([{"x": 1}], {"field": "y"}, r"a record has no field 'y': choose from x"),
        ([b"x"], {"field": "y"}, r"records are bytes, not fields"),
        ([{"x": 1}], {"key": True}, r"a record has no field '__key__': choose from x"),
        ([{"__key__": "0001"}], {"key": True}, r"key '0001' of record 0 does not end in / _ - or \. and digits"),
        ([{"__key__": "a"}], {"key": "b+"}, r"key 'a' of record 0 does not match 'b\+'"),
        ([{"__key__": "a"}], {"key": "("}, r"key '\(' is not a regular expression: missing \)"),
        ([{"__key__": "a"}], {"key": False}, r"key must be a regular expression or True, got False"),
        (RangeSource(3), {"key": True}, r"record 0 has no key: pass field= instead"),
        ([{"x": 1}], {"shards": True}, r"list has no shards: shard_lengths is missing"),
    ],
)
def test_sequences_that_cannot_be_told_apart(records, options, match):
    with pytest.raises(ConfigError, match=match):
        sequence_lengths(records, **options)


@pytest.mark.parametrize(
    ("records", "match"),
    [
        ([{"y": b"1"}], "a record has no field 'x': choose from y"),
        ([b"abc"], "records are bytes, not fields: choose a codec"),
        ([{"x": b""}, {"x": 3}], "'x' of record 1 has no length: expected an array, bytes or text, got"),
        ([{"x": np.array(3.5)}], r"field 'x' of record 0 has no length: .*, got array\(3\.5\)"),
    ],
)
def test_records_without_a_length(records, match):
    with pytest.raises(ConfigError, match=match):
        record_lengths(MemorySource(records), "x")


def model(records, lengths, length, stride, ends, offsets):
    """Yield each anchor and its window, built record by record."""
    groups = {name: offsets.get(name, range(length or 1)) for name in records[0]} if records else {}
    masks = {f"{name}_is_pad": offsets[name] for name in offsets} if ends == "pad" else {}
    if ends == "pad" and length and set(groups) - set(offsets):
        masks["is_pad"] = range(length)
    reach = [0, *(offset for group in groups.values() for offset in group)]
    first = 0
    for stop in np.cumsum(lengths).tolist():
        # The first anchor is the first record whose window is inside; the others follow at the stride.
        inside = range(first - min(reach), stop - max(reach)) if ends == "drop" else range(first, stop)
        for anchor in inside[::stride]:
            window = {}
            for name, group in groups.items():
                values = [records[min(max(anchor + offset, first), stop - 1)][name] for offset in group]
                if length is None and name not in offsets:
                    window[name] = values[0]
                else:
                    window[name] = tuple(values) if isinstance(values[0], (str, bytes)) else np.stack(values)
            for name, group in masks.items():
                window[name] = np.array([not first <= anchor + offset < stop for offset in group])
            yield anchor, window
        first = stop


OFFSETS = st.dictionaries(
    st.sampled_from(["x", "y", "name", "raw"]), st.lists(st.integers(-3, 4), min_size=1, max_size=3), max_size=4
)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any),
    length=st.none() | st.integers(1, 4),
    stride=st.integers(1, 3),
    ends=st.sampled_from(["drop", "pad"]),
    offsets=OFFSETS,
    shards=st.integers(1, 3),
    data=st.data(),
)
def test_equals_a_loop(lengths, length, stride, ends, offsets, shards, data):
    numbers = range(sum(lengths))
    records = [{"x": np.array([i, -i]), "y": np.array(i * 0.5), "name": f"r{i}", "raw": bytes([i])} for i in numbers]
    both = [*model(records, lengths, length, stride, ends, offsets)]
    anchors, expected = [anchor for anchor, _ in both], [window for _, window in both]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(records)), min_size=shards - 1, max_size=shards - 1)))
    edges = [0, *cuts, len(records)]
    parts = [MemorySource(records[a:b]) for a, b in itertools.pairwise(edges) if a < b]
    source = ConcatSource(parts)
    if not expected:
        with pytest.raises(ConfigError, match="no sequence is long enough for a window: it takes"):
            windows(source, lengths, length, stride, ends=ends, offsets=offsets)
        return
    for inner in (source, list(records)):  # a list gives whole records
        found = windows(inner, lengths, length, stride, ends=ends, offsets=offsets)
        assert len(found) == found.sequence_lengths.sum() == len(expected)
        assert [found.locate(i) for i in range(len(found))] == [as_source(inner).locate(anchor) for anchor in anchors]
        indices = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=6))
        names = data.draw(st.lists(st.sampled_from(sorted(found.fields)), unique=True))
        batch = default_collate([expected[i] for i in indices])
        same(found.read(indices), [expected[i] for i in indices])
        same(found.read_batch(indices), batch)
        same(found.read_batch(indices, names), {name: batch[name] for name in names})
        if inner is source:
            in_shards = [sum(a <= anchor < b for anchor in anchors) for a, b in itertools.pairwise(edges)]
            assert found.shard_lengths == tuple(n for n in in_shards if n)


def episodes(count=40):
    return MemorySource(
        {"image": np.arange(count * 4, dtype=np.uint8).reshape(count, 2, 2), "action": np.arange(count)}
    )


def test_follows_the_rules_of_sources():
    offsets = {"action": [-1, 0, 3]}
    source = windows(episodes(), [15, 0, 25], 2, 3, ends="pad", offsets=offsets)
    assert [each for each in check_source(source) if each.status == "failed"] == []
    lengths, of_numpy = np.array([15, 0, 25]), {"action": np.array([-1, 0, 3])}
    numpys = windows(episodes(), lengths, np.int32(2), np.int64(3), ends="pad", offsets=of_numpy)
    assert pickle.loads(pickle.dumps(source)).fingerprint() == numpys.fingerprint() == source.fingerprint()
    other = windows(episodes(), lengths, 2, 3, ends="pad", offsets={"action": [-1, 0, 2]})
    assert len({source.fingerprint(), other.fingerprint(), windows(episodes(), [40], 2).fingerprint()}) == 3
    assert source.sequence_lengths.tolist() == [5, 9]
    assert repr(source) == "WindowSource(MemorySource(40 records), 14 windows in 3 sequences)"
    found = windows(MemorySource([{"text": "a", "bytes": b"b", "x": 0.5}] * 2), [2], 2).fields
    assert [*map(str, found.values())] == ["unknown", "unknown", "float64 (2)"]
    tuples = MemorySource([{"p": Point(i, (f"{i}",)), "t": f"{i}"} for i in range(4)])
    assert windows(tuples, [4]).read_batch([3, 0, 3])["p"].x.tolist() == [3, 0, 3]
    pairs = windows(tuples, [4], 2)
    assert pairs.read([2, 0, 2])[1]["p"] == (Point(0, ("0",)), (1, ("1",)))
    assert windows(pairs, [3], 2).read([1, 0])[1]["t"] == (("0", "1"), ("1", "2"))
    one, other = windows(MemorySource([{"x": [{"a": 1}]}] * 3), [3], 2).read([0, 1])
    one["x"][1][0]["a"] = 2
    assert other["x"] == ([{"a": 1}], [{"a": 1}]), "windows that overlap share no lists"


def test_reads_each_record_once_and_only_the_fields_that_need_it():
    class Counted(MemorySource):
        def _read_columns(self, indices, fields):
            reads.append((sorted(indices.tolist()), fields))
            return super()._read_columns(indices, fields)

    reads, asked = [], []
    source = windows(Counted({"image": np.zeros((20, 2)), "action": np.arange(20)}), [20], offsets={"action": range(4)})
    source.read_batch([3, 4, 6])
    assert reads == [([3, 4, 6], ("image",)), ([*range(3, 10)], ("action",))]

    class Dicts(list):
        """A data set of torch's kind: whole records, one by one."""

        def __getitem__(self, index):
            asked.append(index)
            return {"x": index, "y": -index}

    source = windows(Dicts(range(20)), [20], offsets={"x": [0, 1]})
    asked.clear()
    batch = source.read_batch([3, 4])
    assert (asked, batch["x"].tolist(), batch["y"].tolist()) == ([3, 4, 5], [[3, 4], [4, 5]], [-3, -4])


def test_reads_ahead_what_windows_need():
    class Ahead(MemorySource):
        def read_ahead(self, steps, fields, *, here, share=1.0):
            self.asked.append(([*steps], fields, here, share))

    inner = Ahead({"x": np.arange(10), "y": np.arange(10)})
    inner.asked = []
    source = windows(inner, [4, 6], ends="pad", offsets={"x": [0, 1]})
    steps = [StepsAhead(0, np.array([0, 3, 9]), np.array([2, 3]), 2)]
    assert source.read_ahead(iter(steps), ["x", "x_is_pad"], here=True, share=0.5) is None
    [((block,), fields, here, share)] = inner.asked
    assert (block.indices.tolist(), block.ends.tolist()) == ([0, 1, 3, 3, 9, 9], [4, 6])
    assert (fields, here, share) == (["x"], True, 0.5)
    inner.asked.clear()
    assert source.read_ahead(iter(steps), None, here=True) is None
    assert {names[0]: block.indices.tolist() for (block,), names, *_ in inner.asked} == {
        "y": [0, 3, 9],
        "x": [0, 1, 3, 3, 9, 9],
    }
    assert source.read_ahead(iter(steps), [], here=True) is None
    assert windows(episodes(), [40]).read_ahead(iter(steps), None, here=True) is None


INTEGERS = "sequence_lengths must be integers in one dimension"
OFFSETS_OF = "offsets of 'action' must be integers, such as [-1, 0], got "


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        ([20, 21], {}, "sequence_lengths have a sum of 41, and the source has 40 records: compute them with"),
        ([20, 30, -10], {}, "sequence_lengths[2] is -10, and the source has 40 records"),
        ([*[2**62] * 4, 40], {}, "sequence_lengths[0] is 4611686018427387904, and the source has 40"),
        ([20.0, 20.0], {}, f"{INTEGERS}, got [20.0, 20.0]"),
        *((lengths, {}, INTEGERS) for lengths in ([[40]], [2**70], [[1], [2, 3]])),
        ([], {}, "sequence_lengths have a sum of 0, and the source has 40 records"),
        ("x" * 78, {}, f"got '{'x' * 78}': "),
        ("x" * 198, {}, f"got '{'x' * 59} ...(120 characters)... {'x' * 19}': "),
        ([40], {"length": 0}, "length must be an integer >= 1, got 0"),
        ([40], {"stride": 0}, "stride must be an integer >= 1, got 0"),
        ([40], {"ends": "next"}, "ends is 'next': choose from drop, pad"),
        ([40], {"offsets": {"actoin": [0]}}, "there is no field 'actoin': did you mean 'action'?"),
        *(([40], {"offsets": {"action": wrong}}, OFFSETS_OF) for wrong in ([], [0.5], [2**40], "01")),
        ([40], {"length": 41}, "it takes 41 records, and the longest sequence has 40: pass ends='pad', or shorter"),
        ([40], {"read": ["imag"]}, "there is no field 'imag': did you mean 'image'"),
        ([2], {"source": [b"a", b"b"]}, "windows need records with fields, and MemorySource(2 records) has none"),
        (
            [2], {"source": {"x": [1, 2], "x_is_pad": [0, 0]}, "ends": "pad", "offsets": {"x": [0, 1]}},
            "ends='pad' adds the mask 'x_is_pad', and the records have a field",
        ),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(lengths, settings, message):
    settings = {"length": 2, **settings}
    read = settings.pop("read", None)
    source = MemorySource(settings.pop("source")) if "source" in settings else episodes()
    with pytest.raises(ConfigError, match=re.escape(message)):
        windows(source, lengths, **settings).read_batch([0], read)


@given(
    st.lists(st.lists(st.integers(0, 400), max_size=7), max_size=4),
    *(st.integers(1, 3), st.integers(1, 5), st.sampled_from([4, 10, 30]), st.integers(-3, 2), st.booleans()),
)
def test_windows_by_time_beside_a_search_in_each_sequence(gaps, stride, length, fps, offset, pads):
    assume(any(gaps))
    sequences = [np.cumsum(each) + 1000 * number for number, each in enumerate(gaps)]  # ms
    source = MemorySource({"time": np.concatenate([*sequences, []]) / 1000, "x": np.arange(sum(map(len, sequences)))})
    expected, start = [], 0
    for times in sequences:
        anchors = [
            (number, [time + k * 1000 / fps for k in range(length)], time + offset * 1000 / fps)
            for number, time in enumerate(times.tolist())
        ]
        inside = lambda time, times=times: times[0] - 5e-4 <= time <= times[-1] + 5e-4  # noqa: E731
        fit = [each for each in anchors if pads or (all(map(inside, each[1])) and inside(each[2]))]
        for _, instants, other in fit[::stride]:
            played = [
                max(0, int(np.searchsorted(times, time + 1e-4, "right")) - 1) + start for time in (*instants, other)
            ]
            expected.append((played[:-1], [not inside(time) for time in instants], played[-1]))
        start += len(times)
    lengths, ends = [*map(len, sequences)], ("drop", "pad")[pads]
    make = partial(windows, source, lengths, length, stride, ends=ends, offsets={"x": [offset]}, fps=fps)
    if sum(lengths) and not expected:
        with pytest.raises(ConfigError, match="no sequence is long enough for a window"):
            make()
        return
    found = [*make()]
    assert [record["x"].tolist() for record in found] == [[other] for *_, other in expected]
    times = np.concatenate([*sequences, []]) / 1000
    assert [record["time"].tolist() for record in found] == [times[played].tolist() for played, *_ in expected]
    if pads:
        assert [record["is_pad"].tolist() for record in found] == [outside for _, outside, _ in expected]


def test_windows_by_seconds():
    source = MemorySource({"time": np.arange(20) / 10, "x": np.arange(20)})
    clips = windows(source, [20], seconds=0.5, fps=4)
    assert clips[1]["x"].tolist() == [1, 3]
    assert len(clips) == 17
    assert clips.fingerprint() != windows(source, [20], 2).fingerprint()
    same(pickle.loads(pickle.dumps(clips))[3], clips[3])
    for wrong in (
        {"seconds": 1},
        {"seconds": 1, "fps": 4, "length": 2},
        {"seconds": 0, "fps": 4},
        {"length": 2, "fps": -1},
    ):
        with pytest.raises(ConfigError, match=r"seconds|fps"):
            windows(source, [20], **wrong)
    with pytest.raises(ConfigError, match="no field 'time'"):
        windows(MemorySource({"x": [1, 2]}), [2], 1, fps=2)
    with pytest.raises(ConfigError, match="record 1 is earlier than the record before it"):
        windows(MemorySource({"time": [1.0, 0.5]}), [2], 1, fps=2)
    with pytest.raises(
        ConfigError, match=r"span 1,700,000,000 seconds, too long for 3,000 sequences: is one of its times 0"
    ):
        windows(MemorySource({"time": [0, 1.7e9] * 3000}), [2] * 3000, 1, fps=2)
    days = np.arange(3).astype("M8[D]")
    for times in (days, days[:, None], np.arange(3).astype("m8[D]") + np.timedelta64(1, "ns")):
        assert windows(MemorySource({"time": times, "x": [0, 1, 2]}), [3], 2, fps=1 / 86400)[1]["x"].tolist() == [1, 2]
    for time, message in ((np.nan, "record 1 is nan"), (1e12, "not a time in seconds"), ([1, 2], "several values")):
        with pytest.raises(ConfigError, match=message):
            windows(MemorySource({"time": np.array([np.zeros_like(time), time])}), [2], 1, fps=2)
