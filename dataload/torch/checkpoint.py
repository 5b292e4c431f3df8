"""States as single values of a checkpoint."""

import json
from collections.abc import Mapping
from typing import Any

from dataload.errors import StateMismatchError


class JsonState:
    """The state of a loader as one value of a checkpoint of ``torch.distributed.checkpoint``.

    A loader is a `Stateful` itself. But then each key of its state is stored apart, and only the keys that a new loader
    has are loaded: checkpoints of an earlier release with fewer keys, and states of streams with keys of their own, are
    refused. As JSON text, the state is one value.

    Args:
        loader: An object with ``state_dict`` and ``load_state_dict`` whose states are for JSON.

    Example:
        >>> import dataload
        >>> loader = dataload.Loader(dataload.RangeSource(5), batch_size=3)
        >>> state = {"loader": JsonState(loader)}  # for `save` and `load` of torch.distributed.checkpoint
        >>> JsonState(loader).load_state_dict(state["loader"].state_dict())
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader under a single key."""
        return {"json": json.dumps(self._loader.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state into the loader.

        Raises:
            StateMismatchError: This is not a state of a `JsonState`, or the loader refuses the state.
        """
        text = state_dict.get("json")
        if not isinstance(text, str):
            raise StateMismatchError(
                f"this is not a state of a JsonState: expected text under 'json', found the keys {sorted(state_dict)}"
            )
        self._loader.load_state_dict(json.loads(text))

    def __repr__(self) -> str:
        return f"JsonState({self._loader!r})"
