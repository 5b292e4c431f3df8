"""Syrah's interface: change ``from syrah import File`` and ``from syrah.utils.data import SyrahDataset``.

Differences from the original:

- Files and datasets can be pickled, and work in forked processes without reopening.
- A written file appears at its path when it is closed, and an `add_item` that fails leaves nothing in it.
- Every number in a file is checked. An inconsistent file raises `CorruptFileError`, which is a `ValueError`.
- Returned arrays are writable. They are flat as before, but the file keeps their shapes for `dataload.open`.
- Without torch, the datasets are plain sequences.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dataload.compat._syrah_file import File, FileError

if TYPE_CHECKING:
    from dataload.compat._syrah_datasets import SyrahConcatDataset, SyrahDataset

__all__ = ["File", "FileError", "SyrahConcatDataset", "SyrahDataset"]


def __getattr__(name: str) -> Any:
    """Import the datasets on first use: they extend torch classes, and torch takes seconds to import."""
    if name in ("SyrahConcatDataset", "SyrahDataset"):
        return getattr(importlib.import_module("dataload.compat._syrah_datasets"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
