"""A source of integers, for testing orders and for measuring everything except reading."""

from collections.abc import Mapping

import numpy as np

from dataload._util.fingerprint import digest
from dataload.errors import ConfigError, closest
from dataload.sources.base import Source
from dataload.types import Batch, FieldSpec, Int64Array


class RangeSource(Source[dict[str, int]]):
    """Record i is ``{"index": start + i * step}``.

    Args:
        stop: End of the range, exclusive.
        start: First value.
        step: Difference between consecutive values; not 0.
    """

    def __init__(self, stop: int, *, start: int = 0, step: int = 1) -> None:
        if step == 0:
            raise ConfigError("step must not be 0", key="step", value=step)
        try:
            self._range = range(start, stop, step)
        except TypeError:
            message = f"a RangeSource takes integers, got {stop!r}, start={start!r}, step={step!r}"
            raise ConfigError(message, key="stop", value=stop) from None

    def __len__(self) -> int:
        return len(self._range)

    def _read(self, indices: Int64Array) -> list[dict[str, int]]:
        return [{"index": value} for value in self._values(indices).tolist()]

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        for name in fields or ():
            if name != "index":
                raise ConfigError(f"there is no field {name!r}: {closest(name, ['index'])}", key="fields", value=name)
        return {"index": self._values(indices)} if fields != () else {}

    def _values(self, indices: Int64Array) -> Int64Array:
        return indices * self._range.step + self._range.start

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The only field, ``index``."""
        return {"index": FieldSpec(str(np.dtype(np.int64)), ())}

    def fingerprint(self) -> str:
        return digest("range", repr(self._range))

    def __repr__(self) -> str:
        return f"RangeSource({self._range.stop}, start={self._range.start}, step={self._range.step})"
