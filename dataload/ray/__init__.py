"""Conversions on a Ray cluster: each partition is a task, which Ray repeats if its machine is lost.

```python
import dataload
import dataload.ray

source = dataload.open("/shared/train.tar", decode="auto") dataload.ray.convert(source, "/shared/train.array_record",
shards=512, address="auto") ```

All machines need the same paths or URLs, and the same packages. This is the only package that needs Ray.
"""

from __future__ import annotations

import os
from typing import Any

from dataload._util.lazy import load_optional
from dataload.convert import ConvertReport
from dataload.convert import convert as _convert
from dataload.ray.engine import RayEngine
from dataload.types import RandomAccessSource

load_optional("ray", needed_by="dataload.ray", extra="ray")

__all__ = ["RayEngine", "convert"]


def convert(
    source: RandomAccessSource[Any],
    destination: str | os.PathLike[str],
    *,
    parts: int | None = None,
    cpus: float = 1,
    memory: int | str | None = None,
    address: str | None = None,
    **options: Any,
) -> ConvertReport:
    """Convert a data set on a Ray cluster; see `dataload.convert.convert`, which takes the `options`.

    Args:
        source: A source from `dataload.open`, or any other that pickles.
        destination: A path that all machines share, or a URL.
        parts: See `RayEngine`, as for `cpus`, `memory` and `address`.
        cpus: See `RayEngine`.
        memory: See `RayEngine`.
        address: See `RayEngine`.
        options: Other arguments of `dataload.convert.convert`, such as ``shards`` and ``resume``.
    """
    engine = RayEngine(parts=parts, cpus=cpus, memory=memory, address=address)
    return _convert(source, destination, engine=engine, **options)
