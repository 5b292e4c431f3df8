"""Resets a model's state for rows that do not continue."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import numpy as np

StateT = TypeVar("StateT")


def reset_state(state: StateT, is_first: Any, *, axis: int = 0, initial: Any = 0) -> StateT:
    """Return the state for a model to start a step with: the initial state for each row that starts a sequence.

    Args:
        state: A numpy array or torch tensor with an axis for the rows; or a tuple, list or dict of these, as an LSTM
            has; None stays None. It is not modified; gradients flow through a tensor.
        is_first: A batch's ``is_first``, (rows,) or (rows, chunk): array or tensor. Only the first column of a chunk
            counts, for a model that takes whole chunks. If sequences may also start inside a chunk (``ends="next"``),
            either accept that, or run the model record by record, each with its column.
        axis: The axis of the rows: 0, or 1 for the ``(layers, rows, hidden)`` of torch's LSTM and GRU.
        initial: The initial state: a number, or something that broadcasts to `state`.

    Examples:
        >>> import numpy as np
        >>> reset_state(np.ones((2, 3)), np.array([True, False])).tolist()
        [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """
    return cast("StateT", _reset(state, is_first if is_first.ndim == 1 else is_first[:, 0], axis, initial))


def _reset(state: Any, rows: Any, axis: int, initial: Any) -> Any:
    if state is None:
        return None
    if isinstance(state, Mapping):
        return {name: _reset(value, rows, axis, initial) for name, value in cast("Mapping[Any, Any]", state).items()}
    if isinstance(state, (tuple, list)):
        kind = cast("type[Any]", type(state))
        parts = [_reset(value, rows, axis, initial) for value in cast("list[Any]", state)]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    shape = [1] * state.ndim
    shape[axis] = -1
    if not hasattr(state, "new_tensor"):
        return np.where(np.asarray(rows).reshape(shape), initial, state).astype(state.dtype, copy=False)
    # A torch tensor. torch is not imported here: the tensor's methods make others on its device.
    flags = rows.to(state.device) if hasattr(rows, "new_tensor") else state.new_tensor(np.asarray(rows, np.float32))
    start = state.new_tensor(initial) if isinstance(initial, np.ndarray) else initial
    return state.where((flags == 0).reshape(shape), start).to(state.dtype)
