"""TorchRecord's images as tensors and batches. Imported on first use, because torch takes seconds to import."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader

from dataload._util.arrays import pooled_empty
from dataload.compat.torchrecord import TRDataset, TRSampler
from dataload.loader import Loader
from dataload.types import Int64Array

_SIDE = 224


def read_image(tensor_protos: Any) -> tuple[torch.Tensor, int]:
    """Return the pixels, (3, 224, 224) uint8, and the label of a message."""
    pixels, label = tensor_protos.protos[0], tensor_protos.protos[1]
    width, height = pixels.dims
    image = np.frombuffer(bytearray(pixels.byte_data), np.uint8).reshape(1, height, width, 3)
    planes = torch.from_numpy(image).permute(0, 3, 1, 2)
    return interpolate(planes, (_SIDE, _SIDE), mode="bilinear", antialias=True)[0], int(label.byte_data)


def collate_images(samples: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """Return images, (rows, 3, 224, 224) float32 in [0, 1], and labels, (rows,) int64."""
    images = torch.from_numpy(pooled_empty((len(samples), 3, _SIDE, _SIDE), np.float32))
    for row, (image, _) in zip(images, samples, strict=True):
        torch.div(image, 255, out=row)
    return [images, torch.tensor([label for _, label in samples], dtype=torch.int64)]


class ImageLoader(DataLoader[Any]):
    """torch's loader with threads as workers: decoding releases the GIL, and sending 19 MB costs as much."""

    def __init__(self, dataset: TRDataset, *, batch_sampler: TRSampler, num_workers: int) -> None:
        super().__init__(cast("Any", dataset), batch_sampler=batch_sampler, num_workers=num_workers)
        self._loader = Loader[Any](
            TRDataset(dataset.record_path, read_image, batch_sampler.record_num),
            batch_size=batch_sampler.batch_size,
            sampler=_Order(batch_sampler),
            collate=collate_images,
            num_workers=num_workers,
            rank=0,  # as in the original, every process reads everything
            world_size=1,
        )

    def __iter__(self) -> Any:
        return iter(self._loader)


class _Order:
    def __init__(self, sampler: TRSampler) -> None:
        self._epoch = functools.lru_cache(2)(sampler.record_numbers)

    def __len__(self) -> int:
        return len(self._epoch(0))

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        return self._epoch(epoch)[positions]
