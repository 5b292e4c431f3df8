"""TorchRecord's interface: change ``from torchrecord import Writer, TorchRecord``.

What differs from the original:

- The sampler mixes through the pool, not the data set. So an epoch has every record once, whatever the numbers of
  records and workers, and `TRDataset` gives what it is asked for, also to torch's own `DataLoader`.
- Every epoch has another order, and without shuffling it is that of the files.
- A missing key is a `CorruptFileError`, not the next record; keys of any width are found.
- What is written shows when it is complete, and replaces a TorchRecord that is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dataload._util.optional import load_optional
from dataload.compat._tensor_protos import message_class
from dataload.compat._torchrecord_reader import TRDataset, TRSampler, default_transform
from dataload.compat._torchrecord_writer import Writer, default_data_process_func

if TYPE_CHECKING:
    TensorProto: Any
    TensorProtos: Any

__all__ = [
    "TRDataset",
    "TRSampler",
    "TensorProto",
    "TensorProtos",
    "TorchRecord",
    "Writer",
    "default_data_process_func",
    "default_transform",
]


def __getattr__(name: str) -> Any:
    if name in ("TensorProto", "TensorProtos"):  # made by protobuf, which is loaded by those who ask for them
        return message_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def TorchRecord(
    record_path: str = "",
    record_num: int = 1,
    shuffle: bool = True,
    batch_size: int = 1,
    num_workers: int = 1,
    transform: Callable[[Any], Any] = default_transform,
) -> Any:
    """A torch `DataLoader` of a TorchRecord: see `TRDataset` and `TRSampler`.

    Raises:
        MissingDependencyError: torch is not installed.
    """
    torch_data = load_optional("torch.utils.data", needed_by="TorchRecord", extra="torch", package="torch")
    dataset = TRDataset(record_path, transform, record_num, shuffle, batch_size)
    sampler = TRSampler(record_path, record_num, shuffle, batch_size=batch_size, num_workers=num_workers)
    return torch_data.DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
