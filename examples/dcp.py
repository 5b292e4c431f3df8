"""Checkpoints of torch.distributed.checkpoint (DCP) that continue on any number of processes.

    torchrun --nproc-per-node 2 examples/dcp.py checkpoints
    torchrun --nproc-per-node 3 examples/dcp.py checkpoints

Kill the first command at any time: the second one continues in the middle of the epoch, with the same global batches.
All processes share one key of the checkpoint, because the loader's state is the same in each of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import dataload
from dataload.torch import DeviceLoader, JsonState, distributed_place

GLOBAL_BATCH = 48
EPOCHS = 3


def make_source() -> dataload.MemorySource:
    features = np.random.default_rng(0).standard_normal((480, 8), dtype=np.float32)
    return dataload.MemorySource({"x": features, "y": np.tanh(features.sum(1, keepdims=True) / 3)})


def train(folder: Path, device: torch.device) -> float:
    place = distributed_place()
    batch_size = GLOBAL_BATCH // place["world_size"]
    loader = DeviceLoader(
        dataload.Loader(
            make_source(), batch_size=batch_size, shuffle=True, tail="drop", num_workers=2, epochs=EPOCHS, **place
        ),
        device,
    )
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "loader": JsonState(loader)}

    step = 0
    if finished := sorted(folder.glob("step-*/.metadata")):  # DCP writes this file last
        latest = finished[-1].parent
        loaded = state()
        load(loaded, checkpoint_id=latest)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        step = int(latest.name.removeprefix("step-"))

    loss = torch.tensor(torch.nan)
    while loader.state_dict()["epoch"] < EPOCHS:
        for batch in loader:
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 4 == 0:
                save(state(), checkpoint_id=folder / f"step-{step:06}")
    loader.close()
    distributed.all_reduce(loss)
    return loss.item() / place["world_size"]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    loss = train(Path(sys.argv[1]), device)
    if distributed.get_rank() == 0:
        print(f"last loss: {loss:.6f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
