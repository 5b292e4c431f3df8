"""Write a data set: as one file, as shards, or as more shards of one that exists."""

from __future__ import annotations

import os
from typing import Any

from dataload._util.indexing import expand_braces
from dataload._util.settings import check_count, check_flags
from dataload.convert.appending import Appender
from dataload.convert.plan import Target
from dataload.convert.sharded import Rule, ShardedWriter
from dataload.errors import ConfigError
from dataload.sources.discover import find_destination
from dataload.sources.writer import Writer
from dataload.storage.remote.settings import parse_bytes


def create(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - the usual word
    overwrite: bool = False,
    append: bool = False,
    shards: int | None = None,
    records_per_shard: int | None = None,
    bytes_per_shard: int | str | None = None,
    **options: Any,
) -> Writer | ShardedWriter:
    """Write a data set: ``with dataload.create("out.syr") as writer: writer.write(record)``.

    Nothing appears at `path` before the writer is closed without an error. With one of `shards`, `records_per_shard`
    and `bytes_per_shard`, there are several files: ``-00000-of-00008`` goes before the suffix, unless the name contains
    ``{shard}`` (and ``{shards}``), as in ``"train-{shard:05d}.tar"``. They appear together, the manifest
    ``dataload.json`` last. At a URL, all are written to local files first.

    Args:
        path: Destination, or ``"format:path"``.
        format: By default the end of the name decides.
        overwrite: Replace existing files. Shards of other names stay.
        append: Add shards, by default one, to a data set with a manifest: `path` is its directory, pattern, or what it
            was created with. They come last in index order, and readers see all of them or none. Several processes may
            append at the same time. Options that the manifest knows, such as ``codec``, may be left out.
        shards: Number of files. Record i goes to file i modulo this number, because the total is not known.
        records_per_shard: Records in each file but the last.
        bytes_per_shard: Maximum size of a file, as a number or ``"1GB"``, in records as the format stores them, before
            compression and without tables.
        options: Options of the format, see its writer class.

    Raises:
        ConfigError: The destination exists, format or option are unknown, or more than one of the three was given; to
            append, there is no manifest, or the first record has other fields than the data set.
    """
    check_flags(overwrite=overwrite, append=append)
    rules = {"shards": shards, "records_per_shard": records_per_shard, "bytes_per_shard": bytes_per_shard}
    given = [name for name, value in rules.items() if value is not None]
    if append and overwrite:
        raise ConfigError("append=True keeps what is there: leave overwrite out", key="overwrite", value=True)
    if not given and not append:
        entry, destination = find_destination(os.fspath(path), format)
        if (named := len(expand_braces(destination))) > 1:
            message = f"{destination!r} names {named} files: pass shards={named} to write all of them"
            raise ConfigError(message, key="shards", value=None)
        return entry.create(destination, overwrite=overwrite, options=options)
    if len(given) > 1:
        message = f"{' and '.join(given)} each determine the files: pass only one of them"
        raise ConfigError(message, key=given[-1], value=rules[given[-1]])
    size = None if bytes_per_shard is None else parse_bytes("bytes_per_shard", bytes_per_shard)
    for name in ("shards", "records_per_shard"):
        if rules[name] is not None:
            check_count(name, rules[name], least=1)
    if append:
        return Appender(os.fspath(path), format, options, Rule(shards if given else 1, records_per_shard, size))
    entry, destination = find_destination(os.fspath(path), format)
    place = options.pop("storage_options", None), options.pop("remote", None)
    target = Target.of(destination, entry.name, *place)
    return ShardedWriter(target, options, overwrite, Rule(shards, records_per_shard, size))
