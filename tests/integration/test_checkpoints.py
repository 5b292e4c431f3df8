"""Trainers that die in the middle of an epoch continue from their own checkpoints, and use each record once."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import require, run_job  # tests/support
from resumable import Resumable

import dataload
from dataload.samplers import GlobalShuffle
from dataload.streams import MultiStreamLoader

ROOT = Path(__file__).parents[2]
EPOCHS, STEPS_PER_EPOCH, CRASH_AFTER = 3, 10, 17

TRAINERS = {
    "lightning_datamodule.py": ("torch", "pytorch_lightning"),
    "huggingface_trainer.py": ("torch", "transformers", "accelerate"),
    "accelerate_state.py": ("torch", "accelerate"),
    "orbax_checkpoints.py": ("jax", "orbax"),
}

# Each imports a framework, which takes seconds.
pytestmark = [pytest.mark.train, pytest.mark.timeout(180)]


def run(example, *runs, launcher=()):
    """Run an example by tests/children/crash.py, and return what it prints. No process is left afterwards."""
    crash = ROOT / "tests" / "children" / "crash.py"
    return run_job([sys.executable, *launcher, crash, ROOT / "examples" / example, *runs])


def received(folder, rank=0):
    """Return the records of each batch that a rank received, over all runs in this folder."""
    return [json.loads(line) for line in Path(f"{folder}.{rank}").read_text().splitlines()]


def all_batches(records):
    """Return the records of each step of an uninterrupted run, in which each record comes once per epoch."""
    epochs = [GlobalShuffle(records, 0).indices(np.arange(records), epoch=epoch) for epoch in range(EPOCHS)]
    return np.concatenate(epochs).reshape(EPOCHS * STEPS_PER_EPOCH, -1).tolist()


@pytest.mark.parametrize("example", TRAINERS)
def test_a_trainer_continues_where_its_checkpoint_was_saved(example, tmp_path):
    require(*TRAINERS[example])
    whole, stopped = str(tmp_path / "whole"), str(tmp_path / "stopped")
    printed = run(example, whole, f"{stopped}:{CRASH_AFTER}", stopped)

    expected = all_batches(640)
    assert received(whole) == expected
    found = received(stopped)
    assert found[:CRASH_AFTER] == expected[:CRASH_AFTER]
    first = CRASH_AFTER + len(expected) - len(found)  # the first step after the checkpoint
    assert STEPS_PER_EPOCH < first < CRASH_AFTER, "the checkpoint is not in the middle of an epoch"
    assert found[CRASH_AFTER:] == expected[first:]
    uninterrupted, resumed = re.findall(r"last loss: (\d\S+)", printed)
    assert resumed == uninterrupted


def test_a_distributed_checkpoint_of_two_ranks_continues_on_three(tmp_path):
    require("torch")
    folder = str(tmp_path / "run")

    def torchrun(ranks, run_in):
        run("dcp.py", run_in, launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)))

    def steps(ranks, start):
        """Return the records of each step, of all ranks: row i of a global batch is on rank i modulo their number."""
        batches = [received(folder, rank)[start(rank) :] for rank in range(ranks)]
        return [np.array(step).T.ravel().tolist() for step in zip(*batches, strict=True)]

    torchrun(2, f"{folder}:{CRASH_AFTER}")
    expected = all_batches(480)
    assert steps(2, lambda _: 0) == expected[:CRASH_AFTER]
    torchrun(3, folder)
    assert steps(3, lambda rank: CRASH_AFTER if rank < 2 else 0) == expected[16:]


class Renaming(Resumable):
    """A stream whose state has other keys at each record."""

    def state_dict(self):
        return {f"after {self.at}": {"next": self.at}}

    def load_state_dict(self, state):
        self.at = next(iter(state.values()))["next"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_keeps_states_of_any_shape(tmp_path, monkeypatch):
    """A fresh loader's state has other keys than the saved one: those of streams, and those of an older release."""
    require("torch")
    from torch.distributed import checkpoint

    from dataload.torch import JsonState

    def streams():
        return MultiStreamLoader(Renaming, [range(1, n) for n in (6, 7, 8)], batch_size=2, mode="split")

    def records():
        return dataload.Loader(dataload.RangeSource(40), batch_size=8, shuffle=True, num_workers=2)

    for make in (streams, records):
        with make() as loader, make() as resumed:
            batches = iter(loader)
            for _ in range(2):
                next(batches)
            state = loader.state_dict()
            if make is records:
                state = {name: value for name, value in state.items() if name not in ("missing", "step_size")}
                state["version"] = 1
                monkeypatch.setattr(loader, "state_dict", lambda state=state: state)
            checkpoint.save({"loader": JsonState(loader)}, checkpoint_id=tmp_path / make.__name__, no_dist=True)
            checkpoint.load({"loader": JsonState(resumed)}, checkpoint_id=tmp_path / make.__name__, no_dist=True)
            assert [repr(batch) for batch in resumed] == [repr(batch) for batch in batches]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # in torchdata itself
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_resumes_as_a_stateful_dataloader_does(workers):
    """Of torchdata; but after the last batch of an epoch, the loader continues with the next epoch."""
    require("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    source = dataload.RangeSource(43)

    def theirs():
        return StatefulDataLoader(
            source, batch_size=8, num_workers=workers, collate_fn=lambda rows: [row["index"] for row in rows]
        )

    def ours():
        return dataload.Loader(source, batch_size=8, num_workers=workers, batch_transform=lambda b: b["index"].tolist())

    def batches(make, step):
        first, second, third, fourth = (make() for _ in range(4))
        iterator = iter(first)
        yield [next(iterator) for _ in range(step)]
        state = first.state_dict()
        yield list(iterator)
        second.load_state_dict(state)
        third.load_state_dict(second.state_dict())  # which has read nothing
        for loader in (second, third):
            yield list(loader)
            yield list(loader)
        fourth.load_state_dict(second.state_dict())  # between epochs
        yield next(iter(fourth))
        yield list(fourth)  # the next epoch, after a `break`

    for step in (0, 1, 4, 5):
        assert list(batches(ours, step)) == list(batches(theirs, step))
