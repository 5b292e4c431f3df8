"""Statistics in the logs of a training run."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

import dataload
from dataload import ConfigError, Loader, RangeSource, telemetry
from dataload.loader.statistics import StageStatistics, Statistics
from dataload.storage.remote.traffic import Downloads
from dataload.telemetry import lightning_callback, log_to, trainer_callback


class TensorBoard:
    def __init__(self):
        self.written = []

    def add_scalar(self, tag, scalar_value, global_step):
        self.written.append((global_step, tag, scalar_value))


class Wandb:
    def __init__(self):
        self.written = []

    def log(self, data, *, step):
        self.written.append((step, data))


def test_each_value_covers_the_time_since_the_last_one():
    mixed = dataload.mix({"web": RangeSource(90), "books": RangeSource(90)}, {"web": 0.75, "books": 0.25})
    board, run = TensorBoard(), Wandb()
    with Loader(mixed, batch_size=3) as loader:
        to_board, to_run = log_to(board, loader, every=2), log_to(run, loader, every=3)
        before = loader.statistics()
        for step, _ in zip(range(1, 8), loader, strict=False):
            to_board(step)
            to_run(step)
            if step == 3:
                first = loader.statistics()
            elif step == 6:
                second = loader.statistics()
        to_run(6)
    assert sorted({step for step, _, _ in board.written}) == [2, 4, 6]
    written = dict(run.written)
    assert [step for step, _ in run.written] == [3, 6], "not step 6 twice"
    for step, recent in ((3, first.since(before)), (6, second.since(first))):
        values = written[step]
        assert values["dataload/rows_per_second"] == recent.rows_per_second
        assert values["dataload/wait_share"] == recent.wait_share
    assert [*written[3]] == [tag for step, tag, _ in board.written if step == 2]
    assert [*written[3]] == [
        f"dataload/{name}"
        for name in (
            *("rows_per_second", "wait_share", "queue_depth", "workers", "bad_records"),
            *("work/read", "source/web", "source/books"),
        )
    ]
    assert written[3]["dataload/source/web"] == 0.75


def test_the_figures_of_downloads_and_stages():
    stages = {"read": StageStatistics(2, 1.5), "decode": StageStatistics(2, 4.5)}
    downloads = Downloads(nbytes=600, shards_found=3, shards_downloaded=1)
    found = {"steps": 2, "rows": 8, "nbytes": 64, "wait_seconds": 1.0, "consumer_seconds": 2.0, "stages": stages}
    found |= {"workers": 2, "executor": "threads", "cpus": 2, "bad": 3, "depth": 0.5}
    assert telemetry.figures(Statistics(**found, downloads=downloads)) == {
        "rows_per_second": 8 / 3,
        "wait_share": 1 / 3,
        "queue_depth": 0.5,
        "workers": 2,
        "bad_records": 3,
        "work/read": 0.25,
        "work/decode": 0.75,
        "download_bytes_per_second": 200,
        "cache_hits": 0.75,
    }
    assert "cache_hits" not in telemetry.figures(Statistics(**found, downloads=Downloads()))


def test_what_log_to_refuses():
    with Loader(RangeSource(8), batch_size=4) as loader:
        with pytest.raises(TypeError, match=r"^log_to takes a writer with add_scalar.*; found dict$"):
            log_to({}, loader)
        with pytest.raises(ConfigError, match="every must be an integer >= 1, got 0"):
            log_to(Wandb(), loader, every=0)
    with pytest.raises(TypeError, match=r"^log_to takes a Loader, .*; found range$"):
        log_to(Wandb(), range(3))


@pytest.fixture
def trainers(monkeypatch):
    """Lightning and transformers, as far as their callbacks need them."""
    lightning, transformers = ModuleType("lightning.pytorch"), ModuleType("transformers")
    lightning.Callback = transformers.TrainerCallback = object
    monkeypatch.setitem(sys.modules, lightning.__name__, lightning)
    monkeypatch.setitem(sys.modules, transformers.__name__, transformers)


class Logger(Wandb):
    """A logger of Lightning, or the trainer of transformers, which knows the step itself."""

    should_log = True

    def log_metrics(self, metrics, step):
        self.written.append((step, metrics))

    def log(self, logs):
        self.written.append((None, logs))
        self.should_log = False


@pytest.mark.usefixtures("trainers")
def test_callbacks_write_at_the_steps_of_a_trainer():
    one, other, trainer = Logger(), Logger(), Logger()
    with Loader(RangeSource(8), batch_size=2) as loader:
        lightning = lightning_callback(loader, every=2)
        for step, _ in enumerate(loader, 1):
            lightning.on_train_batch_end(SimpleNamespace(loggers=[one, other], global_step=step), "model", step)
        transformers = trainer_callback(trainer, loader, every=2)
        for step in range(1, 4):
            trainer.should_log = step != 3
            transformers.on_step_end("arguments", SimpleNamespace(global_step=step), trainer, model="model")
            assert trainer.should_log == (step != 3), "the trainer's own values are due as before"
    assert [step for step, _ in one.written] == [2, 4]
    assert one.written == other.written
    assert "dataload/wait_share" in one.written[0][1]
    assert [{*values} for _, values in trainer.written] == [{*one.written[0][1]}]
