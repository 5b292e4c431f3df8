"""Pickles objects with their large arrays out of band, and restores them."""

import copyreg
import importlib
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dataload.types import BytesColumn

_SMALL_BYTES = 16 << 10
"""Smaller arrays are copied into the pickle, so that keeping the labels of a batch does not keep all of its memory."""


def take_apart(value: Any) -> list[memoryview]:
    """Return the pickle of `value`, then the buffers of its large arrays, which are not copied."""
    buffers: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _SMALL_BYTES:
            buffers.append(raw)
        return raw.nbytes < _SMALL_BYTES

    stream = io.BytesIO()
    _pickler(stream, is_small).dump(value)
    return [stream.getbuffer(), *buffers]


def put_together(parts: Sequence[Any]) -> Any:
    """Return the value passed to `take_apart`; its large arrays are views of `parts`."""
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301 - from our own process


def check_pickle(value: Any) -> None:
    """Raise if `value` cannot be pickled, without using memory for the result."""
    _pickler(_Discard(), lambda _: False).dump(value)


class _Discard:
    def write(self, data: Any) -> int:
        return len(data)


def _pickler(stream: Any, buffer_callback: Callable[[pickle.PickleBuffer], bool]) -> pickle.Pickler:
    pickler = pickle.Pickler(stream, protocol=5, buffer_callback=buffer_callback)
    own: dict[type, Callable[[Any], Any]] = {BytesColumn: _reduce_column}
    torch = sys.modules.get("torch")  # loaded if there are tensors
    if torch is not None:
        own[torch.Tensor] = _reduce_tensor
    pickler.dispatch_table = ChainMap(own, copyreg.dispatch_table)
    return pickler


def _reduce_column(column: BytesColumn) -> Any:
    """Reduce a column to its bytes and their ends; by itself it pickles as a list."""
    blocks, block_of, starts, stops = column.parts()
    if block_of is None and len(starts) and bool((starts[1:] == stops[:-1]).all()):
        values = blocks[0][int(starts[0]) : int(stops[-1])]
    else:
        values = np.frombuffer(b"".join(column.views()), np.uint8)
    return BytesColumn.packed, (values, np.cumsum(stops - starts))


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor to an array; torch's own method copies its storage into the pickle."""
    torch = sys.modules["torch"]
    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.requires_grad
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor.__reduce_ex__(5)
    # Dimensions in memory order, so that channels_last and transposed tensors keep their layout.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(order).contiguous()
    try:
        return _tensor, (dense.numpy(), None, order)
    except TypeError:  # a dtype that numpy lacks, such as bfloat16
        return _tensor, (dense.reshape(-1).view(torch.uint8).numpy(), (tensor.dtype, tuple(dense.shape)), order)


def _tensor(array: Any, dtype_and_shape: tuple[Any, tuple[int, ...]] | None, order: list[int]) -> Any:
    tensor: Any = importlib.import_module("torch").from_numpy(array)
    if dtype_and_shape is not None:
        dtype, shape = dtype_and_shape
        tensor = tensor.view(dtype).reshape(shape)
    return tensor.permute(sorted(range(len(order)), key=order.__getitem__))
