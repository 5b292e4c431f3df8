"""Run by a Python that has LeRobot and torchcodec: seconds for items of LeRobotDataset, or for frames by torchcodec.

Prints JSON. `datasets` looks for torchvision, whose builds for CUDA and torch's for CPUs do not get along, so it comes
before the stand-in.
"""

import json
import sys
import time
from unittest.mock import MagicMock


def items(root, order, deltas, workers, batch_size):
    """Seconds for the items in this order, by torch's DataLoader, after the batches that its workers made at first."""
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
    begun = time.perf_counter()
    rows = sum(len(batch["index"]) for batch in batches)
    return {"seconds": time.perf_counter() - begun, "rows": rows}


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
