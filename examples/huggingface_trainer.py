"""A Hugging Face Trainer that resumes in the middle of an epoch without skipping through batches.

    python examples/huggingface_trainer.py checkpoints

Kill it at any time and run it again: it reads only the remaining batches, because the loader's state is saved together
with the Trainer's own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

import dataload
from dataload.torch import distributed_place, to_tensors


class Model(nn.Module):
    """A small regression model with the interface of a transformers model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), y)}


class DataloadTrainer(Trainer):
    """A Trainer that trains on the batches of a `dataload.Loader`."""

    def __init__(self, loader: dataload.Loader, **settings: Any) -> None:
        super().__init__(**settings)
        self.loader = loader
        self.add_callback(LoaderState(loader))

    def get_train_dataloader(self) -> Any:
        return self.loader


class LoaderState(TrainerCallback):
    """A callback that saves the loader's state in the checkpoint directory."""

    def __init__(self, loader: dataload.Loader) -> None:
        self.loader = loader

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        if state.is_world_process_zero:  # the state is the same in every process
            self.path(args, state).write_text(json.dumps(self.loader.state_dict()))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        if state.global_step:
            self.loader.load_state_dict(json.loads(self.path(args, state).read_text()))

    def path(self, args: TrainingArguments, state: TrainerState) -> Path:
        return Path(str(args.output_dir), f"checkpoint-{state.global_step}", "loader.json")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    features = np.random.default_rng(0).standard_normal((640, 8), dtype=np.float32)
    source = dataload.MemorySource({"x": features, "y": np.tanh(features.sum(1, keepdims=True) / 3)})
    model = Model()
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=3,
        save_steps=4,
        ignore_data_skip=True,  # the loader is already at the right position
        learning_rate=1e-2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    with dataload.Loader(
        source,
        batch_size=64 // distributed_place()["world_size"],
        shuffle=True,
        num_workers=2,
        batch_transform=to_tensors,
        **distributed_place(),
    ) as loader:
        trainer = DataloadTrainer(loader, model=model, args=arguments)
        finished = sorted(folder.glob("checkpoint-*/loader.json"), key=os.path.getmtime)  # `on_save` comes last
        trainer.train(resume_from_checkpoint=str(finished[-1].parent) if finished else None)
    with torch.no_grad():
        print(f"last loss: {model(**to_tensors(source.read_batch(range(len(source)))))['loss']:.6f}")


if __name__ == "__main__":
    main()
