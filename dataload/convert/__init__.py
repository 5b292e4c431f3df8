"""Any format to any format: in shards, in bounded memory, and resumable after a kill.

```python
import dataload
from dataload.convert import convert

with dataload.open("train.tar", decode="auto") as source:
    report = convert(source, "train.array_record", shards=8)
```

Each shard gets its final name when it is whole. Beside the destination lies a hidden manifest,
``.<destination>.convert.json``, with the plan and the size and SHA-256 of what is finished. It stays when all is
done: resuming a finished conversion then does nothing, so a job that is started again need not know how it ended.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataload._util.fingerprint import digest
from dataload.convert.blocks import read_ahead
from dataload.convert.manifest import Finished, Manifest, examine, is_intact, remove_temporaries
from dataload.convert.plan import Shard, destination_format, manifest_path, plan_shards, summarize_paths
from dataload.errors import ConfigError, SourceNotFoundError
from dataload.sources.registry import Format, construct, load
from dataload.sources.writer import Writer
from dataload.types import RandomAccessSource

__all__ = ["ConvertReport", "convert"]

_KEY = "__key__"
_KEY_DIGITS = 8
_DEFAULT_CODEC = "tensorprotos"
_BYTES_FIELD = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What a conversion has done.

    Attributes:
        paths: The files, in index order.
        format: Name of the format.
        records: Records in all of them.
        bytes: Their size.
        resumed: Records of shards that an earlier run had finished.
        notes: What was decided on the way, in sentences.
        manifest: The manifest, with the SHA-256 of each file.
    """

    paths: tuple[str, ...]
    format: str
    records: int
    bytes: int
    resumed: int
    notes: tuple[str, ...]
    manifest: str

    @property
    def pattern(self) -> str:
        """The files as one text that `dataload.open` takes."""
        return summarize_paths(self.paths)


def convert(
    source: RandomAccessSource[Any],
    destination: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - the word that users expect
    writer_options: Mapping[str, Any] | None = None,
    shards: int | None = None,
    records_per_shard: int | None = None,
    keep_key: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Write the records of a source, in index order, as files of another format.

    Values go to each format as its writer takes them. Three things are decided here, and said in the report: a
    format of bytes is given fields through the codec "tensorprotos" unless `writer_options` names another; plain
    bytes become the field "data" where a format has only fields; and a tar sample's ``__key__`` is dropped where it
    is not a key.

    Args:
        source: What `dataload.open` gives, or anything with ``__len__`` and ``__getitem__``.
        destination: A path. With `shards` or `records_per_shard`, ``-00000-of-00008`` goes before its suffix, unless
            its name holds ``{shard}`` (and ``{shards}``), as in ``"train-{shard:05d}.tar"``. LMDB's shards are
            directories. The directory that it lies in must exist.
        format: Name of the format; by default the suffix of `destination` decides.
        writer_options: Options of the format's writer, such as ``codec``.
        shards: Number of files. The records are split evenly: their numbers differ by one at most.
        records_per_shard: Instead of `shards`: at most so many in each, evenly too.
        keep_key: Keep ``__key__`` as a field.
        resume: Go on where a run for the same destination was killed: shards that it finished stay, others are
            written. Without such a run it starts from the beginning.
        overwrite: Replace files that are there, each when its new content is whole.
        progress: Called with (records done, records in all) at the start and as they are written.

    Raises:
        ConfigError: Something is at the destination; a record does not fit the format; or, with `resume`, the source
            or the plan is another than when the conversion was begun: one line for each difference.
        SourceNotFoundError: The directory of the destination does not exist.
        SourceError: The source cannot be read.
    """
    destination = os.fspath(destination)
    if resume and overwrite:
        raise ConfigError("resume keeps what is there, overwrite replaces it: give one of them", key="overwrite")
    entry = destination_format(destination, format)
    plan = plan_shards(destination, entry, len(source), shards=shards, records_per_shard=records_per_shard)
    writing = _prepare(source, entry, dict(writer_options or {}), keep_key)
    wanted = Manifest.of(
        plan,
        source=_fingerprint(source),
        records=len(source),
        format=entry.name,
        options={name: _describe(value) for name, value in {**writing.options, "keep_key": keep_key}.items()},
    )
    path = manifest_path(destination)
    manifest = _begin(path, wanted, plan, resume=resume, overwrite=overwrite)
    notes = list(writing.notes)
    manifest = _without_damaged(manifest, plan, notes)
    todo = [shard for shard in plan if os.path.basename(shard.path) not in manifest.finished]
    resumed = len(source) - sum(shard.stop - shard.start for shard in todo)
    tell = _Teller(progress, resumed, len(source))
    manifest = _write_shards(source, todo, writing, manifest, path, overwrite=resume or overwrite, tell=tell)
    return ConvertReport(
        paths=tuple(shard.path for shard in plan),
        format=entry.name,
        records=len(source),
        bytes=sum(shard.bytes for shard in manifest.finished.values()),
        resumed=resumed,
        notes=tuple(notes),
        manifest=path,
    )


@dataclass(frozen=True, slots=True)
class _Writing:
    """How records become files of a format."""

    entry: Format
    options: dict[str, Any]
    counts: bool  # the writer wants to know how many records there will be
    adapt: Callable[[Any, int], Any]
    notes: tuple[str, ...]


def _prepare(source: RandomAccessSource[Any], entry: Format, options: dict[str, Any], keep_key: bool) -> _Writing:
    parameters = inspect.signature(load(entry, "writer")).parameters
    takes_bytes = "codec" in parameters
    notes: list[str] = []
    first = source[0] if len(source) else None
    has_fields = isinstance(first, Mapping)
    if has_fields and takes_bytes and options.get("codec") is None:
        options = {**options, "codec": _DEFAULT_CODEC}
        notes.append(f"the fields of a record become bytes by the codec {_DEFAULT_CODEC!r}: open with it to read them")
    wraps = first is not None and not has_fields and not takes_bytes
    if wraps:
        notes.append(f"the records have no fields: each becomes the field {_BYTES_FIELD!r}")
    drops = has_fields and _has_key(first) and entry.name != "tar" and not keep_key
    if drops:
        notes.append(f"the field {_KEY!r} of tar samples is dropped; keep_key=True keeps it")

    # Left alone, a tar writer would number the samples of each shard from 0.
    numbers = entry.name == "tar" and "key" not in options and not (has_fields and _has_key(first))

    def adapt(record: Any, index: int) -> Any:
        if wraps:
            record = {_BYTES_FIELD: record}
        if numbers:
            return {_KEY: f"{index:0{_KEY_DIGITS}d}", **record}
        return {name: value for name, value in record.items() if name != _KEY} if drops else record

    counts = "num_records" in parameters and "num_records" not in options
    return _Writing(entry, options, counts, adapt, tuple(notes))


def _has_key(record: Any) -> bool:
    return _KEY in record


def _fingerprint(source: Any) -> str:
    own = getattr(source, "fingerprint", None)
    return str(own()) if callable(own) else digest(type(source).__qualname__, len(source))


def _describe(option: Any) -> str:
    """Text of an option that is the same in every process: the default repr of an object is its address."""
    if callable(option) or type(option).__repr__ is object.__repr__:
        named = option if hasattr(option, "__qualname__") else type(option)
        return f"{named.__module__}.{named.__qualname__}"
    return repr(option)


def _begin(path: str, wanted: Manifest, plan: Sequence[Shard], *, resume: bool, overwrite: bool) -> Manifest:
    """The manifest to go on with: the one at `path`, or `wanted`."""
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise SourceNotFoundError(f"there is no directory {directory} to write to", path=directory)
    begun = None if overwrite else Manifest.load(path)
    if begun is not None and resume:
        differences = "".join(f"\n  {line}" for line in begun.differences(wanted))
        if differences:
            raise ConfigError(
                f"{path} is of another conversion, which cannot go on as this one:{differences}", key="resume"
            )
        return begun
    taken = [] if overwrite else [shard.path for shard in plan if os.path.exists(shard.path)]
    if taken:
        several = f" (and {len(taken) - 1} more)" if len(taken) > 1 else ""
        unfinished = begun is not None and len(begun.finished) < len(begun.shards)
        resuming = "resume=True to go on with the conversion that was interrupted, or " if unfinished else ""
        raise ConfigError(
            f"{taken[0]} exists{several}: choose another name, or pass {resuming}overwrite=True to replace it",
            key="overwrite",
            value=taken[0],
        )
    return wanted


def _without_damaged(manifest: Manifest, plan: Sequence[Shard], notes: list[str]) -> Manifest:
    """`manifest` without the shards that are no longer as they were when they were finished."""
    intact: dict[str, Finished] = {}
    for shard in plan:
        name = os.path.basename(shard.path)
        finished = manifest.finished.get(name)
        if finished is not None and is_intact(shard.path, finished):
            intact[name] = finished
        elif finished is not None:
            notes.append(f"{shard.path} was not as it had been finished, and is written again")
    return replace(manifest, finished=intact)


class _Teller:
    """Counts records for the caller's progress function."""

    def __init__(self, progress: Callable[[int, int], None] | None, done: int, total: int) -> None:
        self._progress = progress
        self._done = done
        self._total = total
        self(0)

    def __call__(self, records: int) -> None:
        self._done += records
        if self._progress is not None:
            self._progress(self._done, self._total)


def _write_shards(
    source: RandomAccessSource[Any],
    shards: Sequence[Shard],
    writing: _Writing,
    manifest: Manifest,
    manifest_path: str,
    *,
    overwrite: bool,
    tell: Callable[[int], None],
) -> Manifest:
    """Write shards one after another, each entered in the manifest when it is in its place."""
    if not shards:
        return manifest
    for shard in shards:
        remove_temporaries(shard.path)
    manifest.save(manifest_path)
    try:
        for shard in shards:
            with _open_writer(writing, shard, overwrite=overwrite) as writer:
                _write_records(source, shard, writer, writing.adapt, tell)
            manifest = manifest.with_finished(os.path.basename(shard.path), examine(shard.path))
            manifest.save(manifest_path)
    except BaseException:
        if not manifest.finished:  # there is nothing to go on with
            os.unlink(manifest_path)
        raise
    return manifest


def _open_writer(writing: _Writing, shard: Shard, *, overwrite: bool) -> Writer:
    count = {"num_records": shard.stop - shard.start} if writing.counts else {}
    return construct(writing.entry, "writer", shard.path, {"overwrite": overwrite, **writing.options, **count})


def _write_records(
    source: RandomAccessSource[Any],
    shard: Shard,
    writer: Writer,
    adapt: Callable[[Any, int], Any],
    tell: Callable[[int], None],
) -> None:
    for first, records in read_ahead(source, shard.start, shard.stop):
        for row, record in enumerate(records):
            try:
                writer.write(adapt(record, first + row))
            except ConfigError as error:
                message = f"record {first + row} of the source cannot be written to {shard.path}: {error}"
                raise ConfigError(message, key=error.key, value=error.value) from error
        tell(len(records))
