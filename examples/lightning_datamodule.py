"""A Lightning DataModule whose position in the data is part of the checkpoint.

    python examples/lightning_datamodule.py

Trains twice: once without interruption, and once stopped in the middle of an epoch and resumed from Lightning's
checkpoint. Both end with the same weights, because the resumed run reads and trains on exactly the remaining batches.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

import dataload
from dataload.torch import distributed_place, to_tensors

EPOCHS = 3
STOP_AFTER = 17  # steps; an epoch has 10


class Data(lightning.LightningDataModule):
    """A data module that loads its batches with `dataload`."""

    def setup(self, stage: str) -> None:  # noqa: ARG002 - passed by name
        features = np.random.default_rng(0).standard_normal((640, 8), dtype=np.float32)
        source = dataload.MemorySource({"x": features, "y": np.tanh(features.sum(1, keepdims=True) / 3)})
        # Not in the constructor, because Lightning sets the rank of this process only later.
        self.train = dataload.Loader(
            source,
            batch_size=64 // distributed_place()["world_size"],
            shuffle=True,
            num_workers=1,
            batch_transform=to_tensors,
            **distributed_place(),
        )

    def train_dataloader(self) -> dataload.Loader:
        return self.train

    # Lightning itself restores a stateful loader within an epoch, but not at the end of one.
    def state_dict(self) -> dict[str, Any]:
        return self.train.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.train.load_state_dict(state_dict)

    def teardown(self, stage: str) -> None:  # noqa: ARG002
        self.train.close()


class Model(lightning.LightningModule):
    """A small regression model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch["x"]), batch["y"])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def fit(folder: Path, *, resume_from: Path | None = None, **limits: int) -> Model:
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STOP_AFTER, save_top_k=-1)],
        **limits,
    )
    trainer.fit(model, datamodule=Data(), ckpt_path=resume_from, weights_only=True)
    return model


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = fit(folder / "whole", max_epochs=EPOCHS)
        fit(folder / "stopped", max_steps=STOP_AFTER)
        (checkpoint,) = (folder / "stopped").glob("*.ckpt")
        resumed = fit(folder / "resumed", resume_from=checkpoint, max_epochs=EPOCHS)
    print(f"uninterrupted: {len(whole.losses)} steps, last loss {whole.losses[-1]:.6f}")
    print(f"resumed after step {STOP_AFTER}: {len(resumed.losses)} steps, last loss {resumed.losses[-1]:.6f}")
    return 0 if whole.losses[STOP_AFTER:] == resumed.losses else 1


if __name__ == "__main__":
    sys.exit(main())
