"""A Lightning DataModule whose position in the data is part of every checkpoint.

    python examples/lightning_datamodule.py checkpoints

Kill it at any time and run it again: it continues in the middle of the epoch.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

import dataload
from dataload.torch import distributed_place, to_tensors


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
            num_workers=2,
            batch_transform=to_tensors,
            **distributed_place(),
        )

    def train_dataloader(self) -> dataload.Loader:
        return self.train

    # Lightning itself saves and restores a stateful loader within an epoch, but does not restore it at the end of one.
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

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        self.loss = nn.functional.mse_loss(self.layers(batch["x"]), batch["y"])
        return self.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(sys.argv[1], every_n_train_steps=4, save_last=True)],
    )
    trainer.fit(model, datamodule=Data(), ckpt_path="last", weights_only=True)
    print(f"last loss: {model.loss.item():.6f}")


if __name__ == "__main__":
    main()
