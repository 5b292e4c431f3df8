"""Train on several processes, each of which reads its share of every batch.

    python examples/ddp.py
    torchrun --nproc-per-node 4 examples/ddp.py

Each step trains on the same records for any number of processes, so both commands give the same model. A stopped run
can continue on a different number of processes:

    torchrun --nproc-per-node 4 examples/ddp.py --checkpoint run.pt --stop-after 20
    torchrun --nproc-per-node 2 examples/ddp.py --checkpoint run.pt
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn

import dataload
from dataload.torch import DeviceLoader, distributed_place, to_tensors

GLOBAL_BATCH = 64
EPOCHS = 2


def make_source() -> dataload.MemorySource:
    features = np.random.default_rng(0).standard_normal((1500, 8), dtype=np.float32)
    return dataload.MemorySource({"x": features, "y": np.tanh(features.sum(1, keepdims=True) / 3)})


def train(checkpoint: Path | None = None, stop_after: int | None = None) -> float:
    """Train for `EPOCHS`, or for `stop_after` steps, and return the loss over all records."""
    place = distributed_place()
    source = make_source()
    # Each process takes an equal share of each batch. The incomplete last batch is dropped, because DDP weighs all
    # processes equally, but their shares of it could differ in size.
    loader = DeviceLoader(
        dataload.Loader(
            source, batch_size=GLOBAL_BATCH // place["world_size"], shuffle=True, tail="drop", num_workers=1, **place
        ),
        "cuda" if torch.cuda.is_available() else "cpu",
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(loader.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=loader.device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    parallel = nn.parallel.DistributedDataParallel(model) if place["world_size"] > 1 else model

    steps = 0
    while steps != stop_after and loader.state_dict()["epoch"] < EPOCHS:
        for batch in loader:
            loss = nn.functional.mse_loss(parallel(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps == stop_after:
                break
    if checkpoint is not None and place["rank"] == 0:
        # The loader's state is the same in every process.
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save(state, checkpoint)
    loader.close()

    everything = to_tensors(source.read_batch(range(len(source))))
    with torch.no_grad():
        return nn.functional.mse_loss(model.cpu()(everything["x"]), everything["y"]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="file to save to, and to continue from if it exists")
    parser.add_argument("--stop-after", type=int, help="steps after which to stop")
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # torchrun
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    loss = train(arguments.checkpoint, arguments.stop_after)
    place = distributed_place()
    if place["rank"] == 0:
        print(f"processes: {place['world_size']}, loss: {loss:.6f}")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
