"""Feed a DALI pipeline from a loader: dataload reads and shuffles, DALI decodes and resizes, and both can resume.

python examples/dali_external_source.py

It needs nvidia-dali-cuda120, which works without a GPU, too, but not beside PyTorch's build for CPUs.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

import dataload

try:
    from nvidia.dali import fn, pipeline_def, types
except ImportError as error:
    raise SystemExit(f"{error}\n\n{__doc__}") from error

Arrays = list[np.ndarray]


def write_images(path: Path, count: int) -> None:
    """Write JPEGs of one grey each; the grey is the label."""
    with dataload.create(path) as writer:
        for grey in range(count):
            image = np.full((30, 40, 3), grey, np.uint8)
            writer.write({"jpg": simplejpeg.encode_jpeg(image), "cls": grey})


def for_dali(batch: dict[str, Any]) -> tuple[Arrays, Arrays]:
    """Return a batch as DALI takes it: for each output, an array per sample."""
    images = [np.frombuffer(data, np.uint8) for data in batch["jpg"]]
    return images, [np.array([label], np.int64) for label in batch["cls"]]


class Epochs:
    """The epochs of a loader. DALI asks for batches before it returns them, so each state waits for its batch."""

    def __init__(self, loader: dataload.Loader[tuple[Arrays, Arrays]]) -> None:
        self.loader = loader
        self.states: deque[dict[str, Any]] = deque()

    def __iter__(self) -> Iterator[tuple[Arrays, Arrays]]:
        for batch in self.loader:
            self.states.append(self.loader.state_dict())
            yield batch


@pipeline_def(num_threads=2, device_id=None)
def decoding(epochs: Epochs) -> tuple[Any, Any]:
    images, labels = fn.external_source(source=epochs, num_outputs=2, cycle="raise", dtype=[types.UINT8, types.INT64])
    return fn.resize(fn.decoders.image(images), resize_x=20, resize_y=20), labels


def train(path: Path, *, state: dict[str, Any] | None = None, steps: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the labels of each step, and the state after the last one."""
    source = dataload.open(path)
    with (
        source,
        dataload.Loader(source, batch_size=16, shuffle=True, num_workers=2, batch_transform=for_dali) as loader,
    ):
        if state is not None:
            loader.load_state_dict(state)
        epochs = Epochs(loader)
        pipeline = decoding(epochs, batch_size=16)
        seen: list[list[int]] = []
        while len(seen) < steps:
            try:
                images, labels = pipeline.run()
            except StopIteration:  # the end of an epoch
                pipeline.reset()
                continue
            state = epochs.states.popleft()
            greys = labels.as_array()[:, 0].tolist()
            for grey, image in zip(greys, images, strict=True):
                assert np.array(image).shape == (20, 20, 3)
                assert abs(float(np.mean(image)) - grey) < 2
            seen.append(greys)
        assert state is not None
        return seen, state


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "greys.tar"
        write_images(path, 100)
        whole, _ = train(path, steps=14)  # two epochs of 7 steps
        begun, state = train(path, steps=5)
        rest, _ = train(path, state=state, steps=9)
        print(f"each image once an epoch: {sorted(chain(*whole[:7])) == list(range(100))}")
        print(f"resumed after step 5: {len(rest)} steps, the same batches: {begun + rest == whole}")


if __name__ == "__main__":
    main()
