"""Help at a prompt: progress, tables in notebooks, what to write instead of names of torch, Hugging Face and others."""

import sys
from collections.abc import Iterable, Mapping
from html import escape
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from dataload.errors import closest, printable

_ORDER = "the loader shuffles: dataload.Loader(source, shuffle=True, seed=0)"
_BATCHES = "the loader makes batches: dataload.Loader(source, batch_size=32)"
_RANKS = "the loader deals records to ranks: rank= and world_size=, or torchrun's RANK and WORLD_SIZE"
_EPOCHS = "each `for` over a loader is an epoch; epochs= limits them"
_FUNCTION = "a function of samples is passed to dataload.Loader as transform=, or to dataload.convert.convert as map="
_TENSORS = "batches are numpy arrays; for tensors, pass batch_transform=dataload.torch.to_tensors to dataload.Loader"
_SUBSET = "it is source[indices]"
_SPLIT = "it is source.split(0.9, seed=0), or source.split({...}) for more parts"
_WORKERS = "workers belong to the loader: dataload.Loader(source, num_workers=4, prefetch=2)"
_FIELDS = "pass the names of the fields to read: dataload.open(path, fields=[...])"
_OPEN = "it is dataload.open(path)"
_OWN = "a source needs no base class, only __len__ and __getitem__"


def _each(names: str, advice: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), advice)


INSTEAD: Mapping[str, Mapping[str, str]] = {
    "module": {
        **{name: f"import it by its name: import dataload.{name}" for name in ("compat", "jax", "testing", "torch")},
        "DataLoader": "it is dataload.Loader; dataload.torch.DataLoader takes torch's arguments",
        **_each(
            "StatefulDataLoader", "it is dataload.Loader, or dataload.torch.DataLoader, which has torch's arguments"
        ),
        **_each("load load_dataset load_from_disk read open_dataset StreamingDataset", _OPEN),
        **_each("WebDataset WebLoader", "import it from dataload.compat.webdataset"),
        **_each("Dataset IterableDataset", _OWN),
        **_each("TensorDataset from_tensor_slices from_dict from_pandas", "it is dataload.MemorySource({...})"),
        **_each("ConcatDataset concatenate_datasets", "it is dataload.concat([...])"),
        **_each("interleave_datasets sample_from_datasets RandomMix", "it is dataload.mix({source: weight, ...})"),
        **_each("random_split train_test_split", _SPLIT),
        **_each("TarWriter ShardWriter MDSWriter ArrowWriter", "it is dataload.create(path)"),
    },
    "option": {
        **_each("transform transforms map_fn preprocess preprocessing_fn", _FUNCTION),
        "streaming": "leave it out: records are read when a loader wants them, also at URLs",
        "columns": "it is fields=[...]",
        **_each("shuffle seed shuffle_buffer", _ORDER),
        **_each("batch_size drop_last", _BATCHES),
        **_each("num_workers workers prefetch", _WORKERS),
        **_each("rank world_size nodesplitter num_shards", _RANKS),
        **_each("maxcount", "it is records_per_shard="),
        **_each("local cache_dir", "it is cache=, a directory for data at URLs"),
    },
    "loader argument": {
        "dataset": "pass it first, without a name",
        "drop_last": "drop_last=True is tail='drop', and False is tail='partial'",
        "collate_fn": "it is collate=",
        "pin_memory": "pin_memory=True is batch_transform=dataload.torch.to_pinned",
        "pin_memory_device": "leave it out; batch_transform=dataload.torch.to_pinned pins for the current device",
        "prefetch_factor": "it is prefetch=",
        "worker_init_fn": "leave it out: a transform f(sample, context) has random numbers as context.generator",
        "persistent_workers": "leave it out: workers live as long as the loader",
        "multiprocessing_context": "multiprocessing_context='fork' is executor='fork'",
        "generator": "it is seed=, an integer",
        **_each("transforms map map_fn operations", "it is transform=, a function of a sample or a list of these"),
        **_each("columns", "it is fields=[...]"),
        **_each("num_epochs", "it is epochs="),
        **_each("worker_count", "it is num_workers="),
        **_each("drop_remainder", "drop_remainder=True is tail='drop'"),
    },
    "sampler": {
        "DistributedSampler": "leave it out: rank= and world_size= do it, or torchrun's RANK and WORLD_SIZE",
        "SubsetRandomSampler": "pass an order: chosen = Subset(Sequential(len(source)), indices), and "
        "GlobalShuffle(len(chosen), seed, parent=chosen), of dataload.samplers",
        "WeightedRandomSampler": "it is dataload.samplers.Weighted(weights, num_samples, seed)",
        "RandomSampler": "it is shuffle=True",
        "SequentialSampler": "leave it out: this is the order without shuffle=",
        "BatchSampler": "leave it out: batch_size= and tail= make batches",
        "Sampler": "dataload.samplers.Subset is the order of a list of indices",
    },
    "source": {
        **_each("map map_dict map_tuple with_transform set_transform apply transform", _FUNCTION),
        **_each("with_format set_format", _TENSORS),
        **_each("shuffle random_map_dataset", _ORDER),
        **_each("batch batched padded_batch iter as_numpy_iterator to_iter_dataset", _BATCHES),
        **_each("take head", "it is source[:n]"),
        "skip": "it is source[n:]",
        "select": _SUBSET,
        **_each("train_test_split random_split", _SPLIT),
        **_each("prefetch num_parallel_calls", _WORKERS),
        **_each("repeat with_epoch with_length", _EPOCHS),
        **_each("shard split_by_node split_by_worker", _RANKS),
        **_each("concatenate", "it is dataload.concat([...])"),
        **_each("interleave", "it is dataload.mix({source: weight, ...})"),
        "window": "it is dataload.windows(source, lengths, ...)",
        "to_tuple": "a record is a dict: record['image'], record['label']",
        "decode": "pass decode='auto' to dataload.open",
        **_each("column_names columns", "it is list(source.fields)"),
        **_each("features dtypes element_spec", "it is source.fields"),
        **_each("num_rows cardinality size", "it is len(source)"),
        **_each("to_pandas to_dict", "read all as columns: source.read_batch(range(len(source)))"),
        **_each("select_columns remove_columns", _FIELDS),
        **_each("save_to_disk push_to_hub save", "it is dataload.convert.convert(source, path)"),
    },
    "loader": {
        "dataset": "it is loader.source; instead of Accelerate's prepare and skip_first_batches, use "
        "dataload.torch.DeviceLoader(loader, accelerator.device) and register_for_checkpointing",
        **_each(
            "batch_size sampler drop_last", "loader.batch_sampler has the order, the batch size, the ranks and the tail"
        ),
        **_each("num_workers", "it is loader.statistics().workers_allowed"),
        **_each(
            "map shuffle batched unbatched repeat",
            "pass it to dataload.Loader: transform=, shuffle=, batch_size=, epochs=",
        ),
        **_each("get_state", "it is loader.state_dict()"),
        **_each("set_state", "it is loader.load_state_dict(state)"),
        **_each("with_epoch with_length", _EPOCHS),
        **_each("as_numpy_iterator", "batches are numpy arrays: for batch in loader"),
    },
}
"""Advice by kind (a module, an option, an argument, ...) and by the name that does not exist there."""


def instead(place: str, name: str, known: Iterable[str] = ()) -> str:
    """Return the end of a message about a missing name: what to write instead, or the closest known name."""
    advice = INSTEAD[place].get(name)
    if advice is not None:
        return f": {advice}"
    return f": {closest(name, known)}" if known else ""


class SaysInstead:
    """Base class of objects whose missing attributes say what to write instead."""

    __slots__ = ()
    _habits: ClassVar[str]

    if not TYPE_CHECKING:  # type checkers report names that do not exist

        def __getattr__(self, name: str) -> Any:
            """Called for missing attributes, and for properties that have failed with an AttributeError."""
            if name in INSTEAD[self._habits] and not hasattr(type(self), name):
                message = f"{type(self).__name__!r} object has no attribute {name!r}{instead(self._habits, name)}"
                raise AttributeError(message, name=name, obj=self)
            return object.__getattribute__(self, name)  # raises Python's own error, or the property's


_SECONDS_UNSHOWN = 2.0


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; a program without a console has None, others an object of their own."""
    return not getattr(stream, "closed", False) and getattr(stream, "isatty", bool)()


class ShownProgress:
    """Shows on a terminal how many of all "shards are open", say, if that takes long."""

    def __init__(self, what: str) -> None:
        self._what, self._begun = what, perf_counter()

    def __call__(self, done: int, total: int) -> None:
        if perf_counter() - self._begun > _SECONDS_UNSHOWN and is_terminal(sys.stderr):
            sys.stderr.write(f"\r{done:,} of {total:,} {self._what}" + ("\n" if done == total else ""))
            sys.stderr.flush()


_LINE = "white-space:pre-wrap;font-family:monospace"
_CELL = "text-align:left;padding:.1em 1em .1em 0;color:inherit;background:transparent"


def html_table(
    title: str, lines: Iterable[str], columns: Iterable[str] = (), rows: Iterable[Iterable[Any]] = ()
) -> str:
    """Return a title, lines of text and a table (omitted without rows), all escaped."""

    def row(tag: str, cells: Iterable[Any]) -> str:
        return "<tr>" + "".join(f'<{tag} style="{_CELL}">{_text(cell)}</{tag}>' for cell in cells) + "</tr>"

    said = "".join(f'<div style="{_LINE}">{_text(line)}</div>' for line in lines)
    body = "".join(row("td", cells) for cells in rows)
    table = f"<table><thead>{row('th', columns)}</thead><tbody>{body}</tbody></table>" if body else ""
    return f"<div><strong>{_text(title)}</strong>{said}{table}</div>"


def _text(value: Any) -> str:
    return escape(printable(str(value), None))
