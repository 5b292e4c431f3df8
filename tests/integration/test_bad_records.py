"""Bad records through the whole loader: the same batches whoever makes them, budgets, reports, damaged files."""

import itertools
import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from made_files import npy, pack

import dataload
from dataload import ConfigError, Loader, RangeSource, WorkerError
from dataload.samplers import GlobalShuffle, Sequential, Weighted

# Worker processes get the path of this one: so they can import what is beside this file.
if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))
import bad_transforms
from bad_transforms import BAD, fail_by_epoch, fail_on_bad

LENGTH = 41

EXECUTORS = {
    "none": {},
    "one thread": {"num_workers": 1},
    "threads": {"num_workers": 3, "prefetch": 4},
    "processes": {"num_workers": 2, "executor": "processes"},
}


def plain(batches):
    """Batches as nested lists, to compare."""
    return [{name: np.asarray(column).tolist() for name, column in batch.items()} for batch in batches]


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


ORDERS = {
    "partial": {"batch_size": 4, "shuffle": True},
    "pad": {"batch_size": 3, "shuffle": True, "tail": "pad"},
    "duplicates": {"batch_size": 6, "sampler": Weighted(np.arange(LENGTH) % 7 == 4, 30, 1), "tail": "drop"},
    "second of three ranks": {"batch_size": 2, "sampler": Sequential(LENGTH), "rank": 1, "world_size": 3},
}


@pytest.mark.parametrize("action", ["skip", "replace"])
@pytest.mark.parametrize("order", ORDERS)
def test_batches_and_reports_are_the_same_whoever_makes_them(tmp_path, action, order):
    settings = {"transform": fail_on_bad, "on_error": action, "epochs": 2, **ORDERS[order]}
    found = {}
    for name, executor in EXECUTORS.items():
        if name == "processes" and order != "pad":
            continue  # they take a while to start: one order shows that they do the same work
        path = tmp_path / f"{name}.jsonl"
        with Loader(RangeSource(LENGTH), error_report=path, **settings, **executor) as loader:
            batches = [plain(loader) for _ in range(2)]
            assert [len(epoch) for epoch in batches] == [len(loader)] * 2
        found[name] = batches, lines(path)
    expected, report = found["none"]
    for name in found:
        assert found[name] == (expected, report), name
    assert {line["index"] for line in report} <= BAD
    assert report
    assert not {index for epoch in expected for batch in epoch for index in batch["index"]} & BAD


@pytest.mark.parametrize(("tail", "world_size"), [("pad", 5), ("partial", 1), ("partial", 2), ("drop", 5)])
def test_ranks_stay_equal_whichever_records_are_bad(tail, world_size):
    def bad_half(sample):
        if sample["index"] < LENGTH // 2:
            raise ValueError("of the first half")
        return sample

    settings = {"batch_size": 2, "tail": tail, "transform": bad_half, "on_error": "skip", "world_size": world_size}
    ranks = [list(Loader(RangeSource(LENGTH), rank=rank, **settings)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    every = [batch for batches in ranks for batch in batches]
    assert len({tuple(batch) for batch in every}) == 1
    served = [index for batch in every for index in batch["index"][batch.get("valid", slice(None))].tolist()]
    rows = 2 * world_size
    assert sorted(served) == list(range(LENGTH // 2, LENGTH // rows * rows if tail == "drop" else LENGTH))
    assert any(not len(batch["index"]) for batch in every)


def test_the_report_is_written_when_a_batch_is_received_not_when_it_is_made(tmp_path):
    path, made = tmp_path / "bad.jsonl", threading.Event()

    def transform(sample):
        if sample["index"] == 9:
            made.set()
            raise ValueError("nine")
        return sample

    settings = {"transform": transform, "on_error": "skip", "error_report": path, "num_workers": 1, "prefetch": 20}
    with Loader(RangeSource(100), batch_size=2, **settings) as loader:
        batches = iter(loader)
        next(batches)
        next(batches)  # only then is the size of a batch known, and work done far ahead
        assert made.wait(20)
        for _ in range(2):
            assert lines(path) == []
            next(batches)
        assert lines(path) == []
        next(batches)  # the fifth, with record 9
        assert [line["index"] for line in lines(path)] == [9]


def test_a_state_saved_before_a_record_was_excluded_goes_on_without_it(tmp_path):
    def load(**settings):
        return Loader(RangeSource(LENGTH), batch_size=3, shuffle=True, seed=5, transform=fail_on_bad, **settings)

    order = GlobalShuffle(LENGTH, 5).indices(np.arange(LENGTH), epoch=0).tolist()
    loader, received = load(), []
    with pytest.raises(WorkerError, match="is bad") as caught:
        received += (batch["index"].tolist() for batch in loader)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["position"] == 3 * caught.value.step
    for settings in ({"exclude": sorted(BAD)}, {"exclude": sorted(BAD), "on_error": "skip", "num_workers": 2}):
        with load(**settings) as other:
            other.load_state_dict(state)
            rest = [batch["index"].tolist() for batch in other]
            assert len(rest) == len(loader) - caught.value.step
            assert [i for rows in received + rest for i in rows] == [i for i in order if i not in BAD]
            assert json.loads(json.dumps(other.state_dict())) == {**state, "epoch": 1, "position": 0}
    # And the other way round.
    excluding = load(exclude=sorted(BAD))
    next(iter(excluding))
    skipping = load(on_error="skip")
    skipping.load_state_dict(excluding.state_dict())
    assert [i for b in skipping for i in b["index"].tolist()] == [i for i in order[3:] if i not in BAD]


def _damaged_tar(path):
    """The content of one member is no npy file."""
    contents = [npy(np.full(3, number, np.float32)) for number in range(12)]
    contents[5] = b"\x93NUMPY\x01\x00 and no more"
    pack(path, [(f"s{number:03d}.x.npy", content) for number, content in enumerate(contents)])
    return dataload.open(path, decode="auto"), "s005"


def _damaged_array_record(path):
    """One bit of one record, which has a chunk of its own. Hashes are compared by the package alone."""
    pytest.importorskip("array_record")
    with dataload.create(path, codec="msgpack", options="group_size:1,uncompressed") as writer:
        for number in range(12):
            writer.write({"x": np.full(3, number, np.float32), "mark": b"MARK%02d" % number})
    data = bytearray(path.read_bytes())
    data[data.index(b"MARK05")] ^= 1
    path.write_bytes(data)
    return dataload.open(path, codec="msgpack", fields=["x"], reader_options=""), None


DAMAGED = {"data.tar": _damaged_tar, "data.array_record": _damaged_array_record}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name, tmp_path):
    """Each format's own reader meets a record that is damaged, among others in one batched read."""
    path, report = tmp_path / name, tmp_path / "bad.jsonl"
    source, key = DAMAGED[name](path)
    settings = {"batch_size": 4, "shuffle": True, "seed": 2}
    order = GlobalShuffle(12, 2).indices(np.arange(12), epoch=0).tolist()

    def numbers(loader):
        with loader:
            return [batch["x"][:, 0].tolist() for batch in loader]

    with pytest.raises(WorkerError, match="failed in read on index 5: CorruptFileError: ") as caught:
        numbers(Loader(source, num_workers=2, **settings))
    assert (str(path) in str(caught.value), caught.value.step) == (True, order.index(5) // 4)
    assert type(caught.value.__cause__) is dataload.CorruptFileError

    kept = [[i for i in order[start : start + 4] if i != 5] for start in (0, 4, 8)]
    for workers in (0, 2):
        assert numbers(Loader(source, on_error="skip", num_workers=workers, error_report=report, **settings)) == kept
    first, second = lines(report)
    assert first == second
    place = {"index": 5, "shard": str(path), "record": 5, "key": key, "step": order.index(5) // 4, "epoch": 0}
    assert first.items() >= {**place, "stage": "read", "error": "CorruptFileError", "source": repr(source)}.items()
    assert first["cause"]

    replaced = numbers(Loader(source, on_error="replace", **settings))
    assert [len(rows) for rows in replaced] == [4, 4, 4]
    assert all(i == j or i == 5 for i, j in zip(order, itertools.chain(*replaced), strict=True))

    assert numbers(Loader(source, exclude=report, **settings)) == kept
    assert numbers(Loader(source, exclude=report, max_bad=0, on_error="skip", num_workers=1, **settings)) == kept
    for other in (RangeSource(12), source[1:]):
        with pytest.raises(ConfigError, match="line 1 is about other data: record 5 is "):
            Loader(other, exclude=report, **settings)


@pytest.mark.parametrize("name", ["none", "threads", "processes"])
def test_any_exception_comes_at_its_step_with_its_traceback(name):
    kinds = bad_transforms.KINDS
    with Loader(RangeSource(20), batch_size=2, transform=fail_by_epoch, timeout=40, **EXECUTORS[name]) as loader:
        for epoch, kind in enumerate(kinds):
            error, text = bad_transforms.make_error(kind)
            received = []
            with pytest.raises(WorkerError) as caught:
                received += (batch["index"].tolist() for batch in loader)
            found = caught.value
            assert received == [[0, 1], [2, 3], [4, 5]], kind
            assert (found.epoch, found.step, found.indices) == (epoch, 3, (6, 7))
            assert f"failed in transform 'fail_by_epoch' on index 7: {text}" in str(found)
            assert ", in fail_by_epoch\n" in found.traceback_text
            assert len(str(found)) + len(found.traceback_text) < 25_000
            assert loader.state_dict()["position"] == 6
            cause = found.__cause__
            if name == "processes":
                assert found.worker.startswith("dataload-")
                assert any(found.traceback_text in note for note in found.__notes__)
                if kind in ("demanding", "holding"):
                    assert cause is None
                    continue
            assert type(cause).__name__ == type(error).__name__
            if kind != "mute":
                assert str(cause) == str(error)


class FailingOrder:
    """A sampler of somebody's own that knows its first block only."""

    def __len__(self):
        return 40_000

    def indices(self, positions, *, epoch):
        if positions[-1] >= 20_000:
            raise LookupError("no such position")
        return positions


@pytest.mark.parametrize("name", ["none", "threads"])
def test_a_sampler_that_fails_is_an_error_at_its_step(name):
    with Loader(RangeSource(40_000), batch_size=4_000, sampler=FailingOrder(), **EXECUTORS[name]) as loader:
        received = []
        with pytest.raises(WorkerError, match=r"step 4 of epoch 0 failed in the order: LookupError: no such") as caught:
            received += (len(batch["index"]) for batch in loader)
        assert received == [4_000] * 4  # plans are made for 16,384 rows at once
        assert isinstance(caught.value.__cause__, LookupError)
        assert "in indices\n" in caught.value.traceback_text


def fail_on_every_fiftieth(sample):
    if sample["index"] % 50 == 7:
        raise ValueError("a fiftieth")
    return sample


@pytest.mark.parametrize("executor", ["none", "threads"])
def test_one_percent_of_the_records_read_may_be_bad_by_default(executor):
    settings = {"batch_size": 100, "transform": fail_on_every_fiftieth, "on_error": "skip", **EXECUTORS[executor]}
    message = (
        r"step 9 of epoch 0 failed: bad records so far: 20 of 1000 \(2\.00%\), and max_bad allows 0\.01; the last is "
        r"index 957, in transform 'fail_on_every_fiftieth': ValueError: a fiftieth"
    )
    with Loader(RangeSource(3000), **settings) as loader:
        with pytest.raises(WorkerError, match=message):
            list(loader)
        loader.load_state_dict(loader.state_dict())  # which starts the count anew, of another 1,000 records
        with pytest.raises(WorkerError) as caught:
            list(loader)
        assert (caught.value.epoch, caught.value.step) == (0, 18)
    with Loader(RangeSource(3000), **settings, max_bad=0.02) as loader:
        assert sum(len(batch["index"]) for batch in loader) == 2940
    with Loader(RangeSource(900), **settings) as loader:  # the share is first looked at in the second epoch
        assert sum(len(batch["index"]) for batch in loader) == 882
        with pytest.raises(WorkerError) as caught:
            list(loader)
        assert (caught.value.epoch, caught.value.step) == (1, 0)
