"""Train on several processes, each of which reads its share of every batch.

    python examples/ddp.py
    torchrun --nproc-per-node 4 examples/ddp.py

Each step trains on the same records for any number of processes, so both commands give the same model. A stopped run
can continue on a different number of processes:

    torchrun --nproc-per-node 4 examples/ddp.py --checkpoint run.pt --stop-after 20
    torchrun --nproc-per-node 2 examples/ddp.py --checkpoint run.pt

So can a job whose machines fail, or that gets more of them, if all machines see the checkpoint: torchrun starts all
processes again, and they continue from there. On each machine:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # torch 2.13 does not tell a machine that joins where to meet otherwise
    torchrun --nnodes 1:3 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id mine \\
        --max-restarts 100 examples/ddp.py --checkpoint /shared/run.pt --checkpoint-every 10

`GLOBAL_BATCH` must be a multiple of every number of processes that may run, here 2, 4 and 6. With --rows-per-process,
each process keeps its number of rows instead, and the rows of all of them change with the number of processes.
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

GLOBAL_BATCH = 60
EPOCHS = 2


def make_source() -> dataload.MemorySource:
    features = np.random.default_rng(0).standard_normal((1500, 8), dtype=np.float32)
    return dataload.MemorySource({"x": features, "y": np.tanh(features.sum(1, keepdims=True) / 3)})


def train(
    checkpoint: Path | None = None,
    stop_after: int | None = None,
    checkpoint_every: int | None = None,
    rows_per_process: int | None = None,
) -> float:
    """Train for `EPOCHS`, or for `stop_after` steps, and return the loss over all records."""
    place = distributed_place()
    source = make_source()
    # Each process takes an equal share of each batch. The incomplete last batch is dropped, because DDP weighs all
    # processes equally, but their shares of it could differ in size.
    loader = DeviceLoader(
        dataload.Loader(
            source,
            batch_size=rows_per_process,
            global_batch_size=GLOBAL_BATCH if rows_per_process is None else None,
            shuffle=True,
            tail="drop",
            num_workers=1,
            **place,
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

    def save() -> None:
        # The loader's state is the same in every process.
        if checkpoint is not None and place["rank"] == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save(state, f"{checkpoint}.tmp")
            os.replace(f"{checkpoint}.tmp", checkpoint)  # a process that is killed leaves the old one or the new one

    steps = 0
    while steps != stop_after and loader.state_dict()["epoch"] < EPOCHS:
        for batch in loader:
            loss = nn.functional.mse_loss(parallel(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if checkpoint_every is not None and steps % checkpoint_every == 0:
                save()
            if steps == stop_after:
                break
    save()
    loader.close()

    everything = to_tensors(source.read_batch(range(len(source))))
    with torch.no_grad():
        return nn.functional.mse_loss(model.cpu()(everything["x"]), everything["y"]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="file to save to, and to continue from if it exists")
    parser.add_argument("--stop-after", type=int, help="steps after which to stop")
    parser.add_argument("--checkpoint-every", type=int, help="steps between two checkpoints")
    parser.add_argument("--rows-per-process", type=int, help=f"instead of {GLOBAL_BATCH} rows of all processes")
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # torchrun
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    loss = train(arguments.checkpoint, arguments.stop_after, arguments.checkpoint_every, arguments.rows_per_process)
    place = distributed_place()
    if place["rank"] == 0:
        print(f"processes: {place['world_size']}, loss: {loss:.6f}")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
