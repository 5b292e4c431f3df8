"""Run by a Python that has LeRobot and torchcodec: seconds for items of LeRobotDataset, or for frames by torchcodec.

Prints JSON. `datasets` looks for torchvision, whose builds for CUDA and torch's for CPUs do not get along, so it comes
before the stand-in.
"""

import json
import os
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock


def items(root, order, deltas, workers, batch_size):
    """Seconds and CPU time for the items in this order, by torch's DataLoader, after its workers' first batches."""
    import datasets  # noqa: F401
    import torch

    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        sys.modules[f"torchvision{name}"] = MagicMock()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    found = LeRobotDataset("local/benchmark", root=root, delta_timestamps=deltas, video_backend="torchcodec")
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(found, batch_size=batch_size, sampler=order, num_workers=workers)
    batches = iter(loader)
    for _ in range(2 * workers + 1):
        next(batches)
    pids = [os.getpid(), *(worker.pid for worker in getattr(batches, "_workers", ()))]
    spent, begun = cpu_seconds(pids), time.perf_counter()
    rows = 0
    while rows < len(order) - (4 * workers + 1) * batch_size:  # at the end as many are in work as at the start
        rows += len(next(batches)["index"])
    return {"seconds": time.perf_counter() - begun, "cpu": cpu_seconds(pids) - spent, "rows": rows}


def cpu_seconds(pids):
    """CPU seconds of processes that run."""
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def frames(path, order):
    """CPU seconds for these frames of a file, in order (None) or one after another."""
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact")
    begun = time.process_time()
    rows = 0
    for index in range(len(decoder)) if order is None else order:
        decoder[index]
        rows += 1
    return {"seconds": time.process_time() - begun, "rows": rows}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps((items if "root" in given else frames)(**given)))
