"""Accelerate: the position in the data is part of what `save_state` saves and `load_state` loads.

    python examples/accelerate_state.py checkpoints

Kill it at any time and run it again: it continues in the middle of the epoch. `accelerate launch` starts it on several
processes. `skip_first_batches` has no place here, because the loaded state is already past these batches.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

import dataload
from dataload.torch import DeviceLoader

GLOBAL_BATCH = 64
EPOCHS = 3


def make_source() -> dataload.MemorySource:
    features = np.random.default_rng(0).standard_normal((640, 8), dtype=np.float32)
    return dataload.MemorySource({"x": features, "y": np.tanh(features.sum(1, keepdims=True) / 3)})


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    accelerator = Accelerator()
    ranks = accelerator.num_processes
    loader = DeviceLoader(
        dataload.Loader(
            make_source(),
            batch_size=GLOBAL_BATCH // ranks,
            shuffle=True,
            tail="drop",
            num_workers=2,
            epochs=EPOCHS,
            rank=accelerator.process_index,
            world_size=ranks,
        ),
        accelerator.device,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    accelerator.register_for_checkpointing(loader)  # instead of `prepare`, which would only return it
    if finished := sorted(folder.glob("epoch-*")):
        accelerator.load_state(str(finished[-1]))

    loss = torch.tensor(torch.nan, device=accelerator.device)
    while (epoch := loader.state_dict()["epoch"]) < EPOCHS:
        for batch in loader:
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            done = loader.state_dict()["position"]
            if done % (4 * GLOBAL_BATCH) == 0 and done:
                accelerator.save_state(str(folder / "unfinished"))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    (folder / "unfinished").rename(folder / f"epoch-{epoch:03}-record-{done:06}")
                accelerator.wait_for_everyone()
    accelerator.print(f"last loss: {torch.as_tensor(accelerator.gather(loss)).mean().item():.6f}")
    loader.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
