"""Measurements of other loaders: which of them can be made, and the files that they need."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dataload.api import create
from dataload.bench.data import Data, Written
from dataload.bench.peers import Peer, get_peer, why_missing
from dataload.bench.peers.reading import Field
from dataload.bench.plan import Choices
from dataload.bench.results import Measurement
from dataload.bench.runner import child_environment
from dataload.bench.task import Task
from dataload.errors import ConfigError, printable, text_of

__all__ = ["plan_peers"]

_OF_BYTES = ("lmdb", "array_record")
_MESSAGE_CHARACTERS = 300
_PREPARE_SECONDS = 3600.0


def plan_peers(
    names: Sequence[str],
    data: Data,
    written: Mapping[str, Written],
    choices: Choices,
    cache: Path,
    *,
    interpreters: Mapping[str, str],
) -> tuple[list[Task], list[Measurement]]:
    """The tasks of peers over the data, in the formats that they read and in their own; and those that cannot be.

    Args:
        names: Of peers.
        data: The records.
        written: The data in our formats. Peers read the tar archive, and of LMDB and ArrayRecord files of their own
            ones with bare bytes, for that is how they are used.
        choices: What is compared. Of a peer that has none of the orders, one that it has is measured; generators have
            one.
        cache: Directory for what is written.
        interpreters: Name -> Python of another environment, for peers that live there.

    Raises:
        ConfigError: There is no such peer.
    """
    tasks: list[Task] = []
    missing: list[Measurement] = []
    for peer in map(get_peer, names):
        task = _nothing(peer, data, choices)
        try:
            tasks += _tasks(peer, data, written, choices, cache, interpreters.get(peer.name))
        except ConfigError as error:
            missing.append(Measurement(task, (), printable(text_of(error), _MESSAGE_CHARACTERS)))
    return tasks, missing


def _tasks(
    peer: Peer, data: Data, written: Mapping[str, Written], choices: Choices, cache: Path, python: str | None
) -> Iterator[Task]:
    absent = why_missing(peer, python)
    if absent is not None:
        raise ConfigError(absent, key="peers", value=peer.name)
    if "generator" in peer.readings or "generator" in written:
        yield from _stream_tasks(peer, data, written, choices)
        return
    field = Field.of_record(cast("Mapping[str, Any]", data.records[0]), decodes=bool(data.decodes))
    if field.kind not in peer.kinds:
        raise ConfigError(f"reads fields of {', '.join(peer.kinds)}, not of {field.kind}", key="peers")
    if not {*written, peer.own_format} & {*peer.readings}:
        lacks = f"reads {', '.join(peer.readings)}, not {', '.join(written)}: add one that it reads to --formats"
        raise ConfigError(lacks, key="formats")
    orders = [order for order in choices.orders if order in peer.orders] or [peer.orders[0]]
    for format_name, reading in peer.readings.items():
        if format_name != peer.own_format and format_name not in written:
            continue
        path = _path(peer, format_name, field, data, written, cache, python)
        for order in orders:
            for workers in choices.workers if peer.workers else (0,):
                yield replace(
                    _nothing(peer, data, choices),
                    reading=reading,
                    path=path,
                    format=format_name,
                    order=order,
                    workers=workers,
                    cold=choices.cold,
                    options=field.to_options(),
                )


def _stream_tasks(peer: Peer, data: Data, written: Mapping[str, Written], choices: Choices) -> Iterator[Task]:
    """Those of generators, which have no file and one order."""
    if "generator" not in written:
        raise ConfigError("reads generators, not records: it is for --made streams", key="peers", value=peer.name)
    if "generator" not in peer.readings:
        raise ConfigError("reads records, not generators", key="peers", value=peer.name)
    for workers in choices.workers:
        yield replace(
            _nothing(peer, data, choices),
            reading=peer.readings["generator"],
            order="sequential",
            workers=workers,
            options={"open": written["generator"].options},
        )


def _nothing(peer: Peer, data: Data, choices: Choices) -> Task:
    """A task that says whose it is, for the row of a peer that is not measured."""
    return Task(
        workload=data.name,
        kind="peer",
        name=peer.name,
        reading="",
        path="",
        format=peer.own_format or next(iter(peer.readings)),
        order=choices.orders[0],
        workers=choices.workers[0],
        batch_size=choices.batch_size,
        seed=choices.seed,
        seconds=choices.seconds,
    )


def _path(
    peer: Peer,
    format_name: str,
    field: Field,
    data: Data,
    written: Mapping[str, Written],
    cache: Path,
    python: str | None,
) -> str:
    """The files of a peer, written on first use."""
    directory = cache / data.content
    if format_name in _OF_BYTES:
        target = directory / f"bytes.{format_name}"
        _once(target, lambda: _write_bytes(target, format_name, data, field))
        return str(target)
    if format_name != peer.own_format:
        return written[format_name].path
    if "tar" not in written:
        remedy = "add tar to --formats" if "tar" in data.formats else f"{data.name} cannot be written as one"
        raise ConfigError(f"its own format is written from a tar archive: {remedy}", key="formats")
    note = directory / f"peer-{peer.name.replace(' ', '-')}.json"
    if not note.exists():
        path = _prepare(peer, written["tar"].path, str(note.with_suffix("")), field, python)
        note.write_text(json.dumps(path), "utf-8")
    return json.loads(note.read_text("utf-8"))


def _prepare(peer: Peer, source: str, directory: str, field: Field, python: str | None) -> str:
    options = json.dumps(field.to_options())
    shutil.rmtree(directory, ignore_errors=True)  # of a run that was ended
    try:
        done = subprocess.run(
            [python or sys.executable, "-m", "dataload.bench.peers.prepare", peer.name, source, directory, options],
            capture_output=True,
            text=True,
            timeout=_PREPARE_SECONDS,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"its files are not written after {_PREPARE_SECONDS:g} s", key="peers") from None
    lines = [line for line in (done.stderr if done.returncode else done.stdout).splitlines() if line.strip()]
    if done.returncode or not lines:
        raise ConfigError(f"its files cannot be written: {lines[-1] if lines else done.returncode}", key="peers")
    return lines[-1]


def _once(target: Path, work: Callable[[], None]) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        work()


def _write_bytes(target: Path, format_name: str, data: Data, field: Field) -> None:
    with create(target, format=format_name) as writer:
        for i in range(len(data.records)):
            writer.write(field.stored(data.records[i][field.name]))
