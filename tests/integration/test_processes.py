"""Worker processes through the loader: what threads give, in shared memory or through a pipe."""

import functools
import io
import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dataload import ConfigError, Loader, RangeSource
from dataload.samplers import Sequential

sys.path.append(str(Path(__file__).parents[1] / "children"))
import works

CHILDREN = Path(works.__file__).parent

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")]


def run(*command):
    """Run Python as a user does, and return the exit status, stdout and stderr."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHILDREN), *sys.path])}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=50, env=environment)
    return done.returncode, done.stdout, done.stderr


def run_file(directory, script):
    path = directory / "train.py"
    path.write_text(textwrap.dedent(script))
    return run(path)


def test_every_sort_of_batch_is_what_threads_give():
    names = list(works.values())
    made = {}
    for executor in ("threads", "processes"):
        settings = {"batch_size": 1, "num_workers": 2, "executor": executor, "collate": works.value_batch}
        with Loader(RangeSource(len(names)), **settings) as loader:
            made[executor] = list(loader)
    for name, found, expected in zip(names, made["processes"], made["threads"], strict=True):
        works.assert_same(found, expected), name


def test_global_generators_give_the_same_for_any_number_of_workers():
    drawn = []
    for workers, method in ((1, "forkserver"), (2, "forkserver"), (2, "fork")):
        settings = {"num_workers": workers, "executor": method, "transform": works.draw}
        with Loader(works.Records(40), batch_size=5, seed=3, **settings) as loader:
            drawn.append([(b["numpy"].tolist(), b["random"].tolist()) for _ in range(2) for b in loader])
    assert drawn[0] == drawn[1] == drawn[2]
    numbers = list(itertools.chain(*(itertools.chain(*pair) for pair in drawn[0])))
    assert len(set(numbers)) == len(numbers) == 2 * 2 * 40


class Unpicklable:
    """A source, or a part of one, that stays where it is."""

    def __init__(self, length=3):
        self.length, self.stream = length, io.TextIOWrapper(io.BytesIO())

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"x": index}

    def __call__(self, value):
        return value


class UnpicklableSampler(Sequential):
    def __reduce__(self):
        raise TypeError("this sampler stays here")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("transform", lambda s: s, r"a copy of the transform '<lambda>', and <function .*cannot be pick"),
        ("transform", [dict, Unpicklable()], "a copy of the transform 'Unpicklable', .*TextIOWrapper"),
        ("collate", lambda s: s, r"a copy of collate, and .*not at the top level .* need cloudpickle \(pip "),
        ("batch_transform", functools.partial(lambda s: s), "a copy of batch_transform"),
        ("source", Unpicklable(), "a copy of the source, and .*, executor='threads' or, in a loader, executor='fork'"),
        ("sampler", UnpicklableSampler(3), "a copy of the sampler, .*this sampler stays here"),
    ],
)
def test_what_cannot_be_pickled_is_named_when_the_loader_is_made(key, value, match, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    settings = {"source": works.Records(3, 2), "batch_size": 2, "num_workers": 1, "executor": "processes", key: value}
    with pytest.raises(ConfigError, match=match) as caught:
        Loader(**settings)
    assert caught.value.key == key
    with Loader(**{**settings, "executor": "fork"}) as loader:
        assert len(list(loader)) == 2


@pytest.mark.slow_suite
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_main_module_without_a_guard_is_told_what_to_do(tmp_path, method):
    script = f"""
        import works
        from dataload import Loader
        settings = {{"num_workers": 1, "executor": {method!r}}}
        for batch in Loader(works.Records(4), batch_size=2, **settings):
            print('batch')
    """
    status, out, err = run_file(tmp_path, script)
    assert (status, out) == (1, "")
    last = err[err.rindex("WorkerError: ") :]
    assert "exited with code 1 before it started; stderr may say why; each worker process" in last
    assert 'guard its top-level code with `if __name__ == "__main__":`' in last
    assert "ConfigError: a worker process tried to start workers: each worker process imports the main" in err


FORKS = """
    import threading
    import numpy as np
    import works
    from dataload import Loader
    from dataload.executors.processes import ProcessExecutor

    class Source:
        copies = 0
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return self.copies
        def __getstate__(self):
            return {"copies": 1}

    if __name__ == "__main__":
        np.ones((300, 300)) @ np.ones((300, 300))  # starts threads of OpenBLAS
        event = threading.Event()
        other = threading.Thread(target=event.wait)
        growing = ProcessExecutor(works.echo, 1, slots=1, start_method=None)
        growing.submit(1).result()
        print(growing.start_method)
        for executor in ("processes", "fork", "spawn", "processes"):
            with Loader(Source(), batch_size=4, num_workers=1, executor=executor) as loader:
                copies = [batch.tolist() for batch in loader]
            print(loader.statistics().start_method, copies)
            if executor == "spawn":
                other.start()
        growing.use(2)
        growing.submit(1).result()
        print(growing.start_method)
        growing.close()
        event.set()
"""


@pytest.mark.slow_suite
def test_processes_are_forks_of_a_process_with_one_thread_and_get_copies(tmp_path):
    status, out, err = run_file(tmp_path, FORKS)
    copied, inherited = [[1] * 4], [[0] * 4]
    expected = f"fork\nfork {copied}\nfork {inherited}\nspawn {copied}\nforkserver {copied}\nforkserver\n"
    assert (status, out) == (0, expected), err


def test_functions_under_the_guard_are_explained(tmp_path):
    script = """
        from dataload import Loader, RangeSource
        if __name__ == "__main__":
            def double(sample):
                return 2 * sample
            next(iter(Loader(RangeSource(4), batch_size=2, num_workers=1, executor="spawn", transform=double)))
    """
    status, _, err = run_file(tmp_path, script)
    assert status == 1
    assert "could not be set up: AttributeError: Can't get attribute 'double' on <module '__mp_main__'" in err
    assert 'workers do not define what stands under `if __name__ == "__main__":`: move it out of there' in err


SESSION = """
    from dataclasses import dataclass
    import numpy as np
    from dataload import Loader, RangeSource

    @dataclass
    class Pair:
        sum: int
        twice: list

    class Squares:
        def __len__(self):
            return 8
        def __getitem__(self, index):
            return index * index

    def twice(values):
        return [2 * value for value in values]

    def collate(samples):
        return Pair(np.sum(samples), twice(samples))

    settings = {"batch_size": 4, "num_workers": 2, "executor": "processes", "collate": collate}
    with Loader(Squares(), transform=[lambda x: x + 1, abs], **settings) as loader:
        batches = list(loader)
    assert all(isinstance(batch, Pair) for batch in batches)
    print([(int(batch.sum), batch.twice) for batch in batches])
"""


def test_functions_and_classes_of_a_session_work_in_workers():
    status, out, err = run("-c", textwrap.dedent(SESSION))
    assert (status, out) == (0, "[(18, [2, 4, 10, 20]), (130, [34, 52, 74, 100])]\n"), err


def test_importing_dataload_loads_nothing_for_processes():
    status, out, _ = run(
        "-c", "import sys, dataload; print([m for m in ('multiprocessing', 'socket') if m in sys.modules])"
    )
    assert (status, out) == (0, "[]\n")
