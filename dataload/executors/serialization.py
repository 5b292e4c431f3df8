"""Pickles objects with their large arrays out of band, and functions of notebooks by value."""

import copyreg
import importlib
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from dataload.errors import SourceError, message_of, traceback_of
from dataload.types import BytesColumn, TextColumn

_SMALL_BYTES = 16 << 10
"""Smaller arrays are copied into the pickle, so that keeping the labels of a batch does not keep all of its memory."""


def take_apart(value: Any, *, by_value: bool = False) -> list[memoryview]:
    """Return the pickle of `value`, then the buffers of its large arrays, uncopied.

    With `by_value`, which is for what all workers get, functions of notebooks go by value if there is cloudpickle, and
    tensors move to memory that all workers share.
    """
    buffers: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _SMALL_BYTES:
            buffers.append(raw)
        return raw.nbytes < _SMALL_BYTES

    stream = io.BytesIO()
    of_session = "cloudpickle" in sys.modules and not has_importable_main()
    base = _by_value_pickler() if by_value or of_session else pickle.Pickler
    pickler = _pickler(base, stream, is_small, shares=by_value)
    if not by_value and of_session:
        pickler.only_main = True
    pickler.dump(value)
    return [stream.getbuffer(), *buffers]


def put_together(parts: Sequence[Any]) -> Any:
    """Return the value passed to `take_apart`; its large arrays are views of `parts`."""
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301 - from our own process


def sendable(error: Exception, where: str) -> Exception:
    """Return the error, or a `SourceError` if it does not pickle, with its traceback and `where` as a note."""
    sent = error
    try:
        put_together(take_apart(error))
    except Exception:  # the error's own class may raise anything
        sent = SourceError(message_of(error))
        for note in getattr(error, "__notes__", ()):
            sent.add_note(note)
    sent.add_note(f"The original traceback, in {where}:\n{traceback_of(error)}")
    return sent


def check_work(value: Any) -> set[str]:
    """Raise if `value` cannot be pickled for workers; return the modules of its classes."""
    pickler = _pickler(_by_value_pickler(), SimpleNamespace(write=len), lambda _: False)
    pickler.modules = set[str]()
    pickler.dump(value)
    return pickler.modules


def has_importable_main() -> bool:
    """Return whether worker processes can import the main module; not so in notebooks and sessions."""
    main = sys.modules["__main__"]
    name: str | None = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return name.rpartition(".")[2] != "__main__"  # multiprocessing does not import the main module of a package
    return getattr(main, "__file__", None) is not None


def _by_value_pickler() -> Any:
    try:
        return _subclass(importlib.import_module("cloudpickle").CloudPickler)
    except ImportError:
        return _subclass(pickle.Pickler)


@cache
def _subclass(base: Any) -> Any:
    """Return a pickler that leaves only what workers cannot import to `base`, and notes modules if asked to."""

    class ByValue(base):
        modules: set[str] | None = None
        only_main = False

        def reducer_override(self, obj: Any) -> Any:
            if self.modules is not None:
                self.modules.update(_modules_of(obj))
            if not isinstance(obj, FunctionType | type) or _is_importable(obj):
                return NotImplemented
            if self.only_main and obj.__module__ not in ("__main__", "builtins"):
                return NotImplemented
            if base is not pickle.Pickler:
                return super().reducer_override(obj)
            if obj.__module__ == "__main__" and not has_importable_main():
                raise pickle.PicklingError(f"{obj.__qualname__} is defined in a notebook or an interactive session")
            return NotImplemented

    return ByValue


def _modules_of(obj: Any) -> set[str]:
    if isinstance(obj, ModuleType):
        return {obj.__name__}
    if isinstance(obj, FunctionType):
        return {obj.__module__}
    return {each.__module__ for each in (obj if isinstance(obj, type) else type(obj)).__mro__}


def _is_importable(obj: Any) -> bool:
    if obj.__module__ == "__main__" and not has_importable_main():
        return False
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _pickler(
    base: Any, stream: Any, buffer_callback: Callable[[pickle.PickleBuffer], bool], *, shares: bool = False
) -> Any:
    pickler = base(stream, protocol=5, buffer_callback=buffer_callback)
    own: dict[type, Callable[[Any], Any]] = {BytesColumn: _reduce_column, TextColumn: _reduce_column}
    torch = sys.modules.get("torch")  # loaded if there are tensors
    if torch is not None and shares:
        table: Any = ForkingPickler(io.BytesIO(), 5).dispatch_table  # torch has registered its types there
        own.update({kind: reduce for kind, reduce in table.items() if kind not in copyreg.dispatch_table})
    elif torch is not None:
        own[torch.Tensor] = _reduce_tensor
    others: Any = base.dispatch_table
    if not isinstance(others, ChainMap):
        others = copyreg.dispatch_table
    # cloudpickle would send the content of the file, and the function of a method without its name.
    own[io.TextIOWrapper] = own[MethodType] = lambda value: value.__reduce_ex__(5)
    descriptor: Any = pickle.Pickler.dispatch_table  # cloudpickle's class hides it
    descriptor.__set__(pickler, ChainMap(own, others))
    return pickler


def _reduce_column(column: BytesColumn) -> Any:
    """Reduce a column to its bytes and their ends, as by itself it pickles as a list."""
    blocks, block_of, starts, stops = column.parts()
    if block_of is None and len(starts) and bool((starts[1:] == stops[:-1]).all()):
        values = blocks[0][int(starts[0]) : int(stops[-1])]
    else:
        values = np.frombuffer(b"".join(column.views()), np.uint8)
    return type(column).packed, (values, np.cumsum(stops - starts))


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor to an array, as torch's own method copies its storage into the pickle."""
    torch = sys.modules["torch"]
    if tensor.is_nested:
        return torch.multiprocessing.reductions.reduce_tensor(tensor)
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
