"""The loaders in the hands of trainers, as docs/from-torch.md shows it."""

import importlib
import itertools
import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import require, run_job  # tests/support

pytestmark = [pytest.mark.train, pytest.mark.timeout(180)]

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402 - skipped where torch is missing

import dataload  # noqa: E402
from dataload.telemetry import lightning_callback, trainer_callback  # noqa: E402
from dataload.torch import DataLoader, DeviceLoader  # noqa: E402


class Numbers(data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.full((2,), float(index)), index


def numbers(batches):
    return [batch[1].tolist() for batch in batches]


@pytest.mark.filterwarnings("ignore")  # Lightning uses what torch deprecates
def test_lightning_puts_its_samplers_in(tmp_path):
    require("pytorch_lightning")
    import pytorch_lightning as lightning
    from pytorch_lightning.utilities.data import _update_dataloader

    class Model(lightning.LightningModule):
        def __init__(self, stop=None):
            super().__init__()
            self.layer, self.seen, self.stop = torch.nn.Linear(2, 1), [], stop

        def training_step(self, batch, step):
            self.seen.append(batch[1].tolist())
            if len(self.seen) == self.stop:
                self.trainer.save_checkpoint(tmp_path / "x.ckpt")
            return self.layer(batch[0]).mean()

        def predict_step(self, batch, step):
            return batch[1]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

        def train_dataloader(self):
            return DataLoader(Numbers(), 2, shuffle=True)

    # What a trainer of two processes does; outside of its hooks it reads the attributes.
    ranks = [data.DistributedSampler(Numbers(), 2, rank, seed=3) for rank in range(2)]
    for sampler in ranks:
        replaced = _update_dataloader(DataLoader(Numbers(), 2, shuffle=True, drop_last=True), sampler)
        assert type(replaced) is DataLoader
        assert numbers(replaced) == numbers(data.DataLoader(Numbers(), 2, sampler=sampler, drop_last=True))

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=2, default_root_dir=tmp_path, **quiet)
    whole = Model(stop=8)
    trainer.fit(whole)
    assert [sorted(itertools.chain(*whole.seen[first : first + 6])) for first in (0, 6)] == [[*range(11)]] * 2
    resumed = Model()
    lightning.Trainer(max_epochs=2, default_root_dir=tmp_path, **quiet).fit(resumed, ckpt_path=tmp_path / "x.ckpt")
    assert resumed.seen == whole.seen[8:]
    predicted = trainer.predict(whole, DataLoader(Numbers(), 5, num_workers=1))
    assert torch.cat(predicted).tolist() == list(range(11))


def test_accelerate_makes_a_loader_of_torch_from_it():
    require("accelerate")
    from accelerate.data_loader import prepare_data_loader

    for rank in range(2):
        for settings in ({"batch_size": 3}, {"batch_size": 2, "drop_last": True}, {"batch_sampler": [[1, 2], [3, 0]]}):
            ours, theirs = (
                prepare_data_loader(loader(Numbers(), **settings), num_processes=2, process_index=rank)
                for loader in (DataLoader, data.DataLoader)
            )
            assert numbers(ours) == numbers(theirs)
    torch.manual_seed(0)
    (ours,) = numbers(prepare_data_loader(DataLoader(Numbers(), 11, shuffle=True)))
    assert sorted(ours) == list(range(11))
    assert ours != sorted(ours)


def test_fabric_saves_and_restores_the_position(tmp_path):
    require("lightning_fabric")
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()

    def loaders():
        ours = DeviceLoader(dataload.Loader(dataload.RangeSource(11), batch_size=2, shuffle=True), fabric.device)
        return ours, DataLoader(Numbers(), 2, sampler=data.SequentialSampler(Numbers()))

    for number, (loader, resumed) in enumerate(zip(loaders(), loaders(), strict=True)):
        iterated = loader if number == 0 else fabric.setup_dataloaders(loader)
        batches = iter(iterated)
        next(batches)
        fabric.save(tmp_path / "x.ckpt", {"loader": loader})
        fabric.load(tmp_path / "x.ckpt", {"loader": resumed})
        rest = [str(batch) for batch in (resumed if number == 0 else fabric.setup_dataloaders(resumed))]
        assert rest == [*map(str, batches)]
        assert len(rest) == 5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_component_for_torchtitan_resumes(tmp_path, monkeypatch):
    require("torchtitan")
    from torch.distributed import checkpoint

    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    example = importlib.import_module("torchtitan_loader")
    with dataload.create(tmp_path / "tokens.syr") as writer:
        for first in range(0, 64, 4):
            writer.write({"tokens": np.arange(first, first + 4)})

    def built(rank, ranks, size):
        config = example.TokenLoader.Config(dataset_path=str(tmp_path / "tokens.syr"), num_workers=0)
        unused = {"tokenizer": None, "seq_len": 3, "snapshot_every_n_steps": 1}  # torchtitan passes it to all
        return config.build(dp_rank=rank, dp_world_size=ranks, local_batch_size=size, **unused)

    def rows(loader, steps):
        found = [inputs["input"] for inputs, labels in itertools.islice(loader, steps) if labels.shape == (size, 3)]
        return torch.cat(found)[:, 0].tolist()

    size = 2
    loader = built(0, 1, size)
    first = rows(loader, 2)
    checkpoint.save({"dataloader": loader}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    size = 1
    rest = []
    for rank in (0, 1):
        resumed = built(rank, 2, size)
        checkpoint.load({"dataloader": resumed}, checkpoint_id=tmp_path / "step-2", no_dist=True)
        rest += rows(resumed, 6)
    assert sorted(first + rest) == [*range(0, 64, 4)]


LIGHTNING = """
import pytorch_lightning as lightning, torch
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []
    def training_step(self, batch, step):
        self.seen += batch["index"].tolist()
        return self.layer(batch["index"][:, None].float()).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
model = Model()
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", **quiet)
trainer.fit(model, loader)
rank, seen = trainer.global_rank, model.seen
"""
ACCELERATE = """
from accelerate import Accelerator
from dataload.torch import DeviceLoader
accelerator = Accelerator(cpu=True)
loader = accelerator.prepare(DeviceLoader(loader, accelerator.device))
rank, seen = accelerator.process_index, [index for batch in loader for index in batch["index"].tolist()]
"""
LAUNCH = {
    "pytorch_lightning": ([], LIGHTNING),
    "accelerate": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], ACCELERATE),
}


@pytest.mark.parametrize("package", LAUNCH)
def test_a_loader_built_at_the_top_of_a_script_reads_the_share_of_its_rank(package, tmp_path):
    require(package)
    launcher, body = LAUNCH[package]
    script = tmp_path / "script.py"
    script.write_text(
        "import json, dataload\n"
        "from dataload.torch import to_tensors\n"
        "loader = dataload.Loader(dataload.RangeSource(12), batch_size=2, batch_transform=to_tensors)\n"
        f"len(loader), loader.state_dict()\n{body}\n"
        f"open({str(tmp_path)!r} + f'/{{rank}}.json', 'w').write(json.dumps(seen))\n"
    )
    run_job([sys.executable, *launcher, script], timeout=150)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [
        [*range(0, 12, 2)],
        [*range(1, 12, 2)],
    ]


class Logger:
    """Keeps what Lightning's trainer gives its loggers."""

    def __init__(self, base):
        kept = self.kept = []

        class Kept(base):
            name, version = "kept", 0

            def log_metrics(self, metrics, step):
                kept.append((step, metrics))

            def log_hyperparams(self, *_):
                pass

        self.logger = Kept()


@pytest.mark.filterwarnings("ignore")
def test_lightning_logs_statistics(tmp_path):
    require("pytorch_lightning")
    import pytorch_lightning as lightning
    from pytorch_lightning.loggers.logger import Logger as Base

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, step):
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    loader, seen = DataLoader(Numbers(), 1), Logger(Base)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "log_every_n_steps": 1}
    callbacks = [lightning_callback(loader, every=2)]
    settings = {"max_epochs": 1, "accumulate_grad_batches": 2, "enable_checkpointing": False}
    lightning.Trainer(logger=seen.logger, callbacks=callbacks, **settings, **quiet).fit(Model(), loader)
    ours = [(step, metrics) for step, metrics in seen.kept if "dataload/wait_share" in metrics]
    assert [step for step, _ in ours] == [0, 2, 4, 6], "optimizer steps, each once"
    assert all(0 <= metrics["dataload/wait_share"] <= 1 for _, metrics in ours)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_hugging_face_logs_statistics(tmp_path):
    require("transformers", "accelerate")
    import transformers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x):
            return {"loss": self.layer(x).mean()}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return loader

    columns = dataload.MemorySource({"x": np.zeros((12, 1), np.float32)})
    loader = dataload.Loader(columns, batch_size=2, batch_transform=dataload.torch.to_tensors)
    settings = {"num_train_epochs": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    settings |= {"logging_steps": 4, "save_strategy": "no"}
    with loader:
        trainer = Trainer(Model(), transformers.TrainingArguments(str(tmp_path), **settings))
        trainer.add_callback(trainer_callback(trainer, loader, every=2))
        trainer.train()
    history = trainer.state.log_history
    assert [each["step"] for each in history if "dataload/wait_share" in each] == [2, 4, 6]
    assert [each["step"] for each in history if "loss" in each] == [4], "its own values are still logged"
