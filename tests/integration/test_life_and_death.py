"""Workers that are killed, stopped or stuck; parents that are killed, interrupted, forked or done."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest

from dataload import Loader, RangeSource, WorkerError

sys.path.append(str(Path(__file__).parents[1] / "children"))
import works

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")]

SECONDS = 30
SLOW = pytest.mark.slow_suite


def slowly(cases):
    """Leave cases to `make test-slow`; an underscore stands for a space."""
    return [pytest.param(*(word.replace("_", " ") for word in case.split()), marks=SLOW) for case in cases.split(", ")]


def wait_until(condition, what):
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, f"not so after {SECONDS} s: {what}"
        time.sleep(0.01)


def runs(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def descendants(pid):
    found = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in listing.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def indices(batches):
    return [batch["index"].tolist() for batch in batches]


@pytest.fixture
def started(tmp_path):
    """Make a loader that has served a batch, so that a short timeout does not end the start of its worker."""

    def start(**settings):
        transform = works.HangAt(4, mark=tmp_path / "there")
        loader = process_loader(works.Records(6), num_workers=1, transform=transform, timeout=1, **settings)

        def first_batch():
            transform.mark.unlink(missing_ok=True)
            batches = iter(loader)
            next(batches)
            return batches

        return loader, transform, patiently(loader, first_batch)

    return start


def patiently(loader, call):
    """Return the result of a call, again from here if a busy machine was so slow that a worker was given up."""
    begun, until = loader.state_dict(), time.monotonic() + SECONDS
    while True:
        with warnings.catch_warnings(), contextlib.suppress(WorkerError):
            warnings.simplefilter("ignore", RuntimeWarning)
            return call()
        assert time.monotonic() < until
        loader.load_state_dict(begun)


def process_loader(source, **settings):
    return Loader(source, **{"batch_size": 2, "num_workers": 2, "executor": "processes", **settings})


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_is_an_error_at_its_step_and_the_next_epoch_works(tmp_path, workers):
    with process_loader(works.Records(20), num_workers=workers, transform=works.DieOnce(9, tmp_path / "x")) as loader:
        found = []
        match = r"(?s)step 4 of epoch 0 failed: .* was killed by SIGKILL .*, at index 9\n  indices of the step: 8, 9"
        with pytest.raises(WorkerError, match=match) as caught:
            found += (batch["index"].tolist() for batch in loader)
        error = caught.value
        assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert (error.step, error.epoch, error.indices) == (4, 0, (8, 9))
        assert error.worker.startswith("dataload-")
        state = loader.state_dict()
        assert indices(loader) == [[i, i + 1] for i in range(0, 20, 2)]
        loader.load_state_dict(state)
        assert indices(loader) == [[i, i + 1] for i in range(8, 20, 2)]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"transform": works.die_at_14483}, "step 905 of epoch 0 failed: .* was killed by SIGKILL .*, at index 14483"),
        ({"collate": works.lambda_at_14480}, "step 905 of epoch 0 failed: .* could not send its batch"),
    ],
)
def test_steps_made_several_at_a_time_fail_at_their_own_step_after_those_before(settings, match):
    with process_loader(RangeSource(16 * 1000), batch_size=16, **settings) as loader:
        received = []
        with pytest.raises(WorkerError, match=match) as caught:
            received += (int(batch["index"][0]) for batch in loader)
        assert received == list(range(0, 14480, 16))
        assert caught.value.step == 905
        assert caught.value.indices == tuple(range(14480, 14496))
        assert loader.state_dict()["position"] == 14480


@pytest.mark.parametrize("executor", ["processes", "threads"])
def test_a_stuck_worker_is_warned_of_with_its_stacks_then_given_up(executor, started):
    loader, transform, batches = started(executor=executor)
    with (
        pytest.warns(
            RuntimeWarning, match=r"(?s)no batch for .* s: dataload-0.* is at step 2 of epoch 0, index 4\n.*hang_here"
        ),
        pytest.raises(
            WorkerError,
            match=r"(?s)step 2 of epoch 0 failed: dataload-0.* has returned no batch for \d+\.\d s "
            r"\(timeout=1\), at index 4\n  indices of the step: 4, 5\n.*hang_here",
        ) as caught,
    ):
        list(batches)
    assert "hang_here" in caught.value.traceback_text
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        if executor == "threads":
            stack.enter_context(pytest.warns(RuntimeWarning, match="1 of the loader's threads did not stop"))
        loader.close()
    assert time.monotonic() - begun < SECONDS
    transform.let_go()  # the thread, for nothing else ends it


SCRIPT = """
    import os, signal, sys, threading, time
    import works
    from dataload import Loader

    def say(*words):
        print(*words, flush=True)

    def main(what, method, here):
        os.mkdir(here)
        settings = {"batch_size": 2, "num_workers": 2, "executor": method}
        if what == "computing":
            loader = Loader(works.Records(1000), transform=works.Hang(here), **settings)
        elif what == "holding the GIL":
            loader = Loader(works.Records(1000), transform=works.Hold(here), **settings)
        elif what == "sending":
            # Everything is kept, so slots run out, and workers wait with results that no pipe holds.
            loader = Loader(works.Records(1000, 10**5), **settings)
        else:
            loader = Loader(works.Records(1000), **settings)
        batches = iter(loader)
        if what in ("computing", "holding the GIL"):
            threading.Thread(target=next, args=(batches,), daemon=True).start()
            while len(os.listdir(here)) < 2:
                time.sleep(0.01)
        elif what == "sending":
            kept = [next(batches) for _ in range(12)]
        else:
            next(batches)
        say("ready", *works.workers())
        if what in ("computing", "holding the GIL", "idle", "sending", "forked"):
            if what == "forked" and os.fork() == 0:
                time.sleep(60)  # keeps all that the parent has open
            signal.pause()
        elif what == "interrupt":
            for batch in batches:
                time.sleep(0.01)
            signal.pause()
        elif what == "break":
            for batch in loader:
                break
        elif what == "exception":
            for batch in loader:
                raise ValueError("in the loop")
        elif what == "collected":
            del batches, loader
            say("left", *works.workers())
        elif what == "daemon thread":
            received = threading.Event()
            def consume():
                while True:
                    for batch in loader:
                        received.set()
            threading.Thread(target=consume, daemon=True).start()
            received.wait()
        elif what == "waiting daemon thread":
            slow = Loader(works.Records(1000), transform=works.Doze(here), **settings)
            threading.Thread(target=list, args=(slow,), daemon=True).start()
            while not os.listdir(here):
                time.sleep(0.01)
        elif what == "closed":
            loader.close()
            say("left", *works.workers())

    if __name__ == "__main__":
        main(*sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(works.__file__).parent), *sys.path])}
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, path, *arguments, tmp_path / "here"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # or readline would take more than a line, which communicate then lacks
            env=environment,
            start_new_session=True,
        )
        started.append(process)
        ready, *pids = process.stdout.readline().decode().split() or [process.stderr.read().decode()]
        assert ready == "ready"
        return process, [int(pid) for pid in pids]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ended(process):
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize(
    ("what", "method"),
    [
        ("computing", "fork"),
        ("forked", "forkserver"),
        *slowly("sending forkserver, holding_the_GIL fork, idle spawn, idle forkserver, computing forkserver"),
        *slowly("sending spawn, forked spawn, holding_the_GIL forkserver"),
    ],
)
def test_workers_die_with_their_parent(script, what, method):
    process, workers = script(what, method)
    others = [pid for pid in descendants(process.pid) if pid not in workers]
    assert len(workers) == 2
    assert all(runs(pid) for pid in workers)
    process.kill()
    wait_until(lambda: not any(runs(pid) for pid in workers), f"the workers {workers} are gone")
    if what != "forked":
        wait_until(lambda: not any(runs(pid) for pid in others), "so are the helpers of multiprocessing")


@pytest.mark.slow_suite
def test_stopped_workers_die_with_their_parent_when_they_go_on(script):
    process, workers = script("idle", "fork")
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    for pid in workers:  # whether the kernel continues them by itself depends on the order in which others exit
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not any(runs(pid) for pid in workers), f"the workers {workers} are gone")


@pytest.mark.parametrize("method", ["forkserver", *(pytest.param(method, marks=SLOW) for method in ("fork", "spawn"))])
def test_ctrl_c_leaves_the_users_own_traceback_and_nothing_else(script, method):
    process, workers = script("interrupt", method)
    others = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    status, _, err = ended(process)
    assert status == -signal.SIGINT
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("\nKeyboardInterrupt\n")
    assert err.count("Traceback") == 1
    assert "train.py" in err
    wait_until(lambda: not any(runs(pid) for pid in [*workers, *others]), "all are gone")


@pytest.mark.parametrize(
    ("what", "method"),
    [
        ("break", "fork"),
        ("exception", "fork"),
        ("waiting daemon thread", "threads"),
        *slowly("break spawn, break forkserver, collected forkserver, closed forkserver, exception forkserver"),
        *slowly("collected fork, closed fork, daemon_thread fork, daemon_thread forkserver, daemon_thread threads"),
        *slowly("waiting_daemon_thread forkserver"),
    ],
)
def test_the_end_of_a_program_leaves_nothing(script, what, method):
    process, workers = script(what, method)
    status, out, err = ended(process)
    assert not any(runs(pid) for pid in workers)
    if what == "exception":
        assert (status, err.count("Traceback")) == (1, 1)
        assert err.endswith("\nValueError: in the loop\n")
    else:
        assert (status, err) == (0, "")
    assert out == ("left\n" if what in ("collected", "closed") else "")


FORK = """
    import os, sys
    import works
    from dataload import Loader
    if __name__ == "__main__":
        loader = Loader(works.Records(40), batch_size=2, num_workers=2, executor=sys.argv[1])
        batches = iter(loader)
        next(batches)
        child = os.fork()
        if child == 0:
            sys.exit(0)  # with everything that is registered for the end of a program
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(batches)) == 19
"""


@SLOW
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_end_of_a_fork_does_not_end_its_parents_workers(method, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(FORK))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(works.__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, path, method], capture_output=True, text=True, timeout=SECONDS, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
