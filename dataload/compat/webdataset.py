"""WebDataset with an order that can resume: ``import dataload.compat.webdataset as wds``.

This is the package webdataset itself, with all of its names. What differs is that `WebDataset` reads archives at
random, in an order that is computed. Where every stage of a pipeline works on single samples up to ``batched``, the
batches are the same for any number of workers, and `state_dict` is exact at every step. Other pipelines run as they do
there, and `state_dict` names the obstacle.

URLs go through dataload's storage. Commands (``pipe:``) run only with ``allow_pipe=True``, and pickles in archives are
loaded only with ``allow_pickle=True``.
"""

import importlib
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataload.compat._webdataset_io import ShardWriter, TarWriter
    from dataload.compat._webdataset_pipeline import WebDataset, WebLoader

__all__ = ["ShardWriter", "TarWriter", "WebDataset", "WebLoader"]

_OURS = {
    **dict.fromkeys(("WebDataset", "WebLoader"), "pipeline"),
    **dict.fromkeys(
        ("Decoder", "FluidInterface", "FluidWrapper", "ShardWriter", "TarWriter", "decode", "gopen", "xdecode"), "io"
    ),
    **dict.fromkeys(("tarfile_samples", "tarfile_to_samples"), "io"),
}
_SUBMODULES = """
    autodecode cache compat extradatasets filters handlers mix pipeline pytorch shardlists tariterators tenbin utils
    writer
"""


def __getattr__(name: str) -> Any:
    """Load webdataset when it is first used, and put our own classes and functions in the place of its."""
    if name.startswith("_"):  # of Python, or of tools that look at modules
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _OURS:
        return getattr(importlib.import_module(f"dataload.compat._webdataset_{_OURS[name]}"), name)
    theirs = importlib.import_module("dataload.compat._webdataset_io").wds
    if name not in _SUBMODULES.split():
        return getattr(theirs, name)
    found = vars(importlib.import_module(f"webdataset.{name}"))
    module = types.ModuleType(f"{__name__}.{name}", found["__doc__"])
    vars(module).update({**found, **{own: __getattr__(own) for own in found.keys() & _OURS.keys()}})
    return globals().setdefault(name, module)
