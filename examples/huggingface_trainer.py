"""A Hugging Face Trainer that resumes in the middle of an epoch without skipping through batches.

    python examples/huggingface_trainer.py

Trains twice: once without interruption, and once stopped in the middle of an epoch and resumed from the checkpoint.
Both end with the same weights. The resumed run reads only the remaining batches, because the loader's state is saved
together with the Trainer's own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

import dataload
from dataload.torch import distributed_place, to_tensors

STEPS = 30  # 3 epochs of 10 steps
STOP_AFTER = 17


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


def train(folder: Path, *, steps: int, resume: bool = False) -> tuple[Model, int]:
    """Return the trained model and the number of batches it was trained on."""
    features = np.random.default_rng(0).standard_normal((640, 8), dtype=np.float32)
    source = dataload.MemorySource({"x": features, "y": np.tanh(features.sum(1, keepdims=True) / 3)})
    model = Model()
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        save_steps=STOP_AFTER,
        ignore_data_skip=True,  # the loader is already at the right position
        learning_rate=1e-2,
        lr_scheduler_type="constant",  # other schedulers depend on max_steps
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    with dataload.Loader(
        source,
        batch_size=64 // distributed_place()["world_size"],
        shuffle=True,
        num_workers=1,
        batch_transform=to_tensors,
        **distributed_place(),
    ) as loader:
        DataloadTrainer(loader, model=model, args=arguments).train(resume_from_checkpoint=resume)
        return model, loader.statistics().steps


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        whole, steps = train(Path(name, "whole"), steps=STEPS)
        train(Path(name, "stopped"), steps=STOP_AFTER)
        resumed, steps_left = train(Path(name, "stopped"), steps=STEPS, resume=True)
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    equal = all(torch.equal(one, other) for one, other in pairs)
    print(
        f"uninterrupted: {steps} batches; resumed after step {STOP_AFTER}: {steps_left} batches; weights equal: {equal}"
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
