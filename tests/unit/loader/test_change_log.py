"""The log of changes of weights: beside the run that wrote it, whatever was undone, torn or of another run."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dataload
from dataload import ConfigError, CorruptFileError, Loader, StateMismatchError

pytestmark = pytest.mark.timeout(90)  # many short runs, which take long on a busy machine

LENGTHS = {"a": 50, "b": 300, "c": 9}


def mixed(seed=3, **options):
    starts = np.cumsum((0, *LENGTHS.values())).tolist()
    places = zip(LENGTHS.items(), starts, strict=False)
    sources = {name: dataload.RangeSource(at + n, start=at) for (name, n), at in places}
    mix = dataload.mix(sources, dict.fromkeys(LENGTHS, 1), stop="never")
    return Loader(mix, batch_size=24 // options.get("world_size", 1), shuffle=True, seed=seed, **options)


def row(*values):
    return dict(zip(LENGTHS, map(float, values), strict=True))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def batches(loader, steps):
    return [loader.batch(0, step)["index"].tolist() for step in steps]


def begun(log):
    """A loader that has served a batch and changed its weights, and its batches."""
    loader = mixed(changes=log)
    iterator = iter(loader)
    next(iterator)
    loader.change_weights(row(1, 2, 1))
    return loader, iterator


def test_a_line_has_a_change(tmp_path):
    log = tmp_path / "blend.jsonl"
    loader, iterator = begun(log)
    next(iterator)
    loader.change_weights(row(1, 0, 1), at=5)
    start, first, second = lines(log)
    assert start["number"] == 0
    assert start["order"] == loader.state_dict()["order"]
    assert (first["number"], first["epoch"], first["position"]) == (1, 0, 24)
    assert first["weights"] == {"a": 1, "b": 2, "c": 1}
    assert (second["number"], second["epoch"], second["position"]) == (2, 0, 120)
    assert second["weights"] == {"b": 0}, "only what has changed"
    assert {"time", "host", "pid"} <= second.keys()
    next(iter(mixed(changes=tmp_path / "nothing.jsonl")))
    assert [line["number"] for line in lines(tmp_path / "nothing.jsonl")] == [0]


runs = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.sampled_from([0.1, 1, 3]), min_size=3, max_size=3)), max_size=4
)


@pytest.mark.slow_suite
@settings(max_examples=10)
@given(runs, st.lists(st.integers(0, 40), max_size=2), st.integers(1, 3))
def test_the_order_of_all_steps_is_known_from_the_log_after_any_kills(tmp_path_factory, run, kills, world_size):
    """The run resumes from some state before, and decides otherwise; the log tells what has become of it."""
    log = tmp_path_factory.mktemp("log") / "blend.jsonl"
    states, served = [mixed().state_dict()], []
    for kill in [*kills, 0]:
        back = kill % len(states)  # the state that the job resumes from
        del states[back + 1 :], served[back:]
        ranks = [mixed(changes=log, rank=rank, world_size=world_size) for rank in range(world_size)]
        for loader in ranks:
            loader.load_state_dict(json.loads(json.dumps(states[-1])))
        iterators = [*map(iter, ranks)]
        for count, weights in run:
            for loader in ranks:
                loader.change_weights(row(*weights), at=None if count % 2 else loader.step + 2)
            for _ in range(count):
                served.append(sorted(itertools.chain(*(next(each)["index"].tolist() for each in iterators))))
                states.append(ranks[0].state_dict())
    known = mixed()
    known.load_state_dict(states[-1])
    if log.exists():
        known.load_changes(log)
    assert [sorted(batch) for batch in batches(known, range(len(served)))] == served
    assert known.state_dict() == states[-1]


def test_a_torn_last_line_is_not_a_change_and_the_next_one_is_whole(tmp_path):
    log = tmp_path / "blend.jsonl"
    loader, _batches = begun(log)
    state = loader.state_dict()
    loader.change_weights(row(1, 9, 1), at=4)
    torn = log.read_bytes()[:-30]
    log.write_bytes(torn)
    again = mixed(changes=log)
    again.load_state_dict(state)
    next(iter(again))
    again.change_weights(row(5, 5, 1))
    assert log.read_bytes().startswith(torn), "something was cut off"
    known = mixed()
    known.load_changes(log)
    served = [*batches(loader, range(1)), *batches(again, range(1, 8))]
    assert batches(known, range(8)) == served
    elsewhere, left = mixed(changes=log), again.state_dict()
    elsewhere.load_state_dict(state)
    elsewhere.change_weights(row(1, 1, 9))  # in the log, it replaces the change of the run that was left
    known.load_state_dict(left)
    known.load_changes(log)
    assert batches(known, range(8)) == served


def test_logs_of_other_runs_are_refused(tmp_path):
    log = tmp_path / "blend.jsonl"
    loader = mixed(changes=log)
    next(iter(loader))
    with pytest.raises(
        ConfigError, match=r"is the log of a run with another order: name another file\n  Mixture\(.*\n  M"
    ):
        mixed(seed=4, changes=log)
    other = mixed()
    other.change_weights(row(1, 2, 3))
    with pytest.raises(StateMismatchError, match=r"is not the log of the run that saved this state: it lacks change 1"):
        mixed(changes=log).load_state_dict(other.state_dict())
    with pytest.raises(StateMismatchError, match=r"is not the log of the run"):
        other.load_changes(log)
    begun_late = mixed(changes=tmp_path / "new.jsonl")
    begun_late.load_state_dict(other.state_dict())
    next(iter(begun_late))
    assert [line["number"] for line in lines(tmp_path / "new.jsonl")] == [0, 1]
    with pytest.raises(ConfigError, match="which only a mixture has"):
        Loader(dataload.RangeSource(9), batch_size=3, changes=log)
    for wrong in ("s3://bucket/log.jsonl", tmp_path, 5):
        with pytest.raises(ConfigError, match="changes must be the path of a log of changes of weights"):
            mixed(changes=wrong)
    with pytest.raises(ConfigError, match=r"there is no directory .*nowhere to write to"):
        mixed(changes=tmp_path / "nowhere" / "blend.jsonl")
    with pytest.raises(ConfigError, match=r"there is no log of changes of weights at .*mistyped\.jsonl"):
        mixed().load_changes(tmp_path / "mistyped.jsonl")


def test_a_log_that_lost_lines_says_which(tmp_path):
    log = tmp_path / "blend.jsonl"
    loader = mixed(changes=log)
    for n in range(1, 4):
        loader.change_weights(row(n, 1, 1), at=n)
    kept = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*kept[:2], *kept[3:]]))
    with pytest.raises(CorruptFileError, match="line 3 has change 3 after change 1: lines were lost"):
        mixed().load_changes(log)


def test_only_rank_0_writes_and_a_log_that_cannot_be_written_stops_the_change(tmp_path):
    ranks = [mixed(rank=rank, world_size=2, changes=tmp_path / f"{rank}.jsonl") for rank in (0, 1)]
    for loader in ranks:
        next(iter(loader))
        loader.change_weights(row(1, 2, 3))
    assert [path.name for path in tmp_path.iterdir()] == ["0.jsonl"]
    (tmp_path / "0.jsonl").unlink()
    (tmp_path / "0.jsonl").mkdir()
    state = ranks[0].state_dict()
    with pytest.raises(OSError, match=r"0\.jsonl"):
        ranks[0].change_weights(row(3, 2, 1))
    assert ranks[0].state_dict() == state
