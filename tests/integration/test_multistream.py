"""The loader of iterators with worker processes: the same batches, states and errors; nothing is left behind."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest

from dataload import WorkerError
from dataload.streams import MultiStreamLoader

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("children", "support")]
import streams
import works
from groups import groups_of

CHILDREN = Path(works.__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

LENGTHS = [3, 0, 17, 1, 8, 5, 2]


def plain(batch):
    return {name: column.tolist() if hasattr(column, "tolist") else column for name, column in batch.items()}


def loader_of(**settings):
    return MultiStreamLoader(streams.count_up, LENGTHS, **{"batch_size": 4, "executor": "processes", **settings})


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_batches_are_those_of_threads(start_method):
    for settings in ({"chunk": 2, "mode": "split", "ends": "pad"}, {"seed": 5}):
        with loader_of(executor="threads", **settings) as loader:
            expected = list(map(plain, itertools.islice(loader, 25)))
        with loader_of(max_workers=2, start_method=start_method, **settings) as loader:
            assert list(map(plain, itertools.islice(loader, 25))) == expected


def test_a_resume_at_every_step_with_another_executor_gives_what_is_left():
    steps = 12
    states = []
    with loader_of(max_workers=2, chunk=2) as loader:
        states.append(loader.state_dict())
        batches = []
        for batch in itertools.islice(loader, steps):
            batches.append(plain(batch))
            states.append(loader.state_dict())
    with contextlib.ExitStack() as stack:
        others = [
            stack.enter_context(loader_of(chunk=2, **settings))
            for settings in ({"max_workers": 1}, {"max_workers": 4, "executor": "threads"}, {"max_workers": 0})
        ]
        for step, loader in zip(range(steps + 1), itertools.cycle(others), strict=False):
            loader.load_state_dict(states[step])
            assert list(map(plain, itertools.islice(loader, steps - step))) == batches[step:]


@pytest.mark.parametrize("size", [1, 3, 64])
def test_states_of_streams_come_from_the_workers(size):
    settings = {"batch_size": 2, "mode": "split", "shuffle": False}
    processes = MultiStreamLoader(streams.Counting, [10, 6], max_workers=2, executor="processes", **settings)
    with groups_of(size), processes as loader:
        found = [(plain(batch), loader.state_dict()) for batch in loader]
    assert found[3][1]["streams"] == [{"next": 4}] * 2
    streams.Counting.made = 0
    with MultiStreamLoader(streams.Counting, [10, 6], **settings) as loader:
        loader.load_state_dict(found[3][1])
        assert list(map(plain, loader)) == [batch for batch, _ in found[4:]]
    assert streams.Counting.made == 6 + 2


def test_large_batches_that_are_kept_are_not_overwritten():
    for workers in (1, 2):
        with MultiStreamLoader(
            streams.large, [30, 20, 40], batch_size=2, max_workers=workers, executor="processes", shuffle=False
        ) as loader:
            kept = list(itertools.islice(loader, 40))
        for batch in kept:
            assert (batch["x"] == batch["offset"][:, None]).all()


def test_a_failing_stream_is_named():
    with MultiStreamLoader(
        streams.break_at_3, [9, 7], batch_size=2, max_workers=2, executor="processes", mode="split", shuffle=False
    ) as loader:
        found = []
        with pytest.raises(
            WorkerError,
            match="step 3 of epoch 0 failed in row 1, at item 3 of sequence 1, 7: OSError: the line is dead",
        ) as caught:
            found += (batch["x"].tolist() for batch in loader)
        assert found == [[0, 0], [1, 1], [2, 2]]
        assert isinstance(caught.value.__cause__, OSError)
        assert "in break_at_3" in caught.value.__notes__[0]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_samples_that_cannot_be_sent_are_an_error_of_their_step(size):
    settings = {"batch_size": 1, "executor": "processes", "collate": len}
    with groups_of(size), MultiStreamLoader(streams.unpicklable_at_2, [9], **settings) as loader:
        found = []
        with pytest.raises(
            WorkerError, match=r"step 2 of epoch 0 failed: dataload-0 \(process \d+\) could not send its batch"
        ):
            found += (batch["data"] for batch in loader)
        assert found == [1, 1]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_killed_worker_is_an_error_that_names_the_stream_and_the_next_for_goes_on(tmp_path, size):
    make = streams.HangAt(4, tmp_path / "mark", kill=True)
    settings = {"batch_size": 2, "max_workers": 2, "executor": "processes", "mode": "split", "shuffle": False}
    with groups_of(size), MultiStreamLoader(make, [5, 4], **settings) as loader:
        batches = iter(loader)
        assert [next(batches)["x"].tolist() for _ in range(2)] == [[0, 0], [1, 1]]
        with pytest.raises(
            WorkerError,
            match=r"step 2 of epoch 0 failed in row 1, at sequence 1, 4: dataload-1 \(.* was killed by SIGKILL",
        ) as caught:
            next(batches)
        assert caught.value.indices == (1,)
        loader.load_state_dict(loader.state_dict())
        assert [batch["x"].tolist() for batch in loader] == [[2, 2], [3, 3], [4, 0]]


def test_a_stuck_worker_is_warned_of_then_given_up_and_named(tmp_path):
    make = streams.HangAt(4, tmp_path / "mark")
    settings = {"batch_size": 2, "max_workers": 2, "executor": "processes", "mode": "split", "shuffle": False}
    with MultiStreamLoader(make, [5, 4], timeout=1, **settings) as loader:
        begun, batches = loader.state_dict(), None
        while batches is None:  # until workers have started within the timeout
            (tmp_path / "mark").unlink(missing_ok=True)
            loader.load_state_dict(begun)
            with warnings.catch_warnings(), contextlib.suppress(WorkerError):
                warnings.simplefilter("ignore", RuntimeWarning)
                iterator = iter(loader)
                next(iterator)
                batches = iterator
        with (
            pytest.warns(
                RuntimeWarning, match="is at step 2 of epoch 0, index 1\nin row 1, at sequence 1, 4\n(.|\n)*streams.py"
            ),
            pytest.raises(
                WorkerError, match=r"step 2 of epoch 0 failed in row 1, at sequence 1, 4: .* returned no batch"
            ),
        ):
            list(batches)


@pytest.mark.parametrize("leave", ["close", "drop"])
def test_generators_are_closed_in_their_processes(tmp_path, leave):
    loader = MultiStreamLoader(
        streams.NoteClosing(tmp_path), ["a", "b", "c"], batch_size=2, max_workers=2, executor="processes"
    )
    next(iter(loader))
    workers = works.workers()
    assert len(workers) == 2
    if leave == "close":
        loader.close()
    del loader
    assert len(list(tmp_path.iterdir())) == 2
    assert {int(path.name.rsplit("-", 1)[1]) for path in tmp_path.iterdir()} == set(workers)


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow_suite)])
def test_workers_go_with_their_parent(tmp_path, end):
    script = """
        import os, sys, time
        import streams, works
        from pathlib import Path
        from dataload.streams import MultiStreamLoader

        if __name__ == "__main__":
            mark = Path(sys.argv[1])
            loader = MultiStreamLoader(streams.count_up, [100], batch_size=2, max_workers=2, executor="processes")
            for batch in loader:
                if not mark.exists():
                    mark.with_suffix(".new").write_text(" ".join(map(str, works.workers())))
                    mark.with_suffix(".new").rename(mark)
                time.sleep(0.01)
    """
    program, mark = tmp_path / "program.py", tmp_path / "mark"
    program.write_text(textwrap.dedent(script))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHILDREN), *sys.path])}
    process = subprocess.Popen([sys.executable, str(program), str(mark)], env=environment, stderr=subprocess.PIPE)
    wait_until(mark.exists)
    workers = [int(word) for word in mark.read_text().split()]
    assert len(workers) == 2
    process.send_signal(end)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -end
    assert (b"KeyboardInterrupt" in errors) == (end == signal.SIGINT)
    wait_until(lambda: not any(map(runs, workers)))


def wait_until(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def runs(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False
