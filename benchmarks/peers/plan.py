"""Plan the measurements of peers: which of them are possible, and the files that they need.

``python -m benchmarks.peers.plan PEER SOURCE DIRECTORY OPTIONS`` writes a peer's own format, in the environment of the
peer. So SOURCE is a file of a format that needs no package: a tar archive. OPTIONS are those of the task, as JSON, see
`Field.to_options`. The last line of its output is the path for ``Task.path``.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import dataload
from benchmarks.peers import PEERS, Peer, why_missing
from benchmarks.peers.field import Field
from benchmarks.workloads import write_once, write_shards
from dataload.bench.data import Choices, Data, Written
from dataload.bench.runner import Measurement, child_environment
from dataload.bench.task import Task
from dataload.errors import ConfigError, printable, text_of

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
    shards: int = 1,
) -> tuple[list[Task], list[Measurement]]:
    """Return the tasks of peers over the data, and a measurement with its error for each impossible peer.

    Peers read the tar archive of `written`, of LMDB and ArrayRecord files of their own with bare bytes, as these are
    used. A peer without the chosen orders is measured with one that it has.
    """
    tasks: list[Task] = []
    missing: list[Measurement] = []
    for peer in map(PEERS.__getitem__, names):
        plan = _Plan(peer, data, written, choices, cache, interpreters.get(peer.name), shards)
        try:
            tasks += plan.tasks()
        except ConfigError as error:
            missing.append(Measurement(plan.row, (), printable(text_of(error), _MESSAGE_CHARACTERS)))
    return tasks, missing


@dataclass(frozen=True)
class _Plan:
    peer: Peer
    data: Data
    written: Mapping[str, Written]
    choices: Choices
    cache: Path
    python: str | None
    shards: int = 1

    @property
    def row(self) -> Task:
        """The task that stands for the peer where it is not measured; the others differ in a few settings."""
        return self.choices.task(
            self.data,
            kind="peer",
            name=self.peer.name,
            reading="benchmarks.peers:open_peer",
            path="",
            format=self.peer.own_format or next(iter(self.peer.readings)),
            order=self.choices.orders[0],
            workers=self.choices.workers[0],
        )

    def tasks(self) -> Iterator[Task]:
        """Yield a task for each format, order and number of workers; writes the files that they need."""
        peer, choices = self.peer, self.choices
        absent = why_missing(peer, self.python)
        if absent is not None:
            raise ConfigError(absent, key="peers", value=peer.name)
        field = Field.of_record(self.data.records[0], self.shards)
        if not {*self.written, peer.own_format} & {*peer.readings}:
            lacks = f"reads {', '.join(peer.readings)}, not {', '.join(self.written)}: add one that it reads to"
            raise ConfigError(f"{lacks} --formats", key="formats")
        orders = [order for order in choices.orders if order in peer.orders] or [peer.orders[0]]
        for form in peer.readings:
            if (form != peer.own_format and form not in self.written) or (self.shards > 1 and form in peer.one_file):
                continue
            task = replace(self.row, path=self._path(form, field), format=form)
            for order in orders:
                for workers in choices.workers if peer.workers else (0,):
                    yield replace(task, order=order, workers=workers, options=field.to_options())

    def _path(self, form: str, field: Field) -> str:
        """Return the peer's files in a format, written on first use."""
        directory, records = self.cache / self.data.content, self.data.records
        if form in _OF_BYTES:
            values = (records[i][field.name].tobytes() for i in range(len(records)))
            if field.shards == 1:
                return write_once(directory / f"bytes.{form}", lambda: values, format=form)
            return write_shards(directory / f"bytes.{form}", [*values], field.shards, format=form)
        if form != self.peer.own_format:
            return self.written[form].path
        if "tar" not in self.written:
            raise ConfigError("its own format is written from a tar archive: add tar to --formats", key="formats")
        note = directory / f"peer-{self.peer.name.replace(' ', '-')}.json"  # the path, once the files are complete
        if not note.exists():
            note.write_text(json.dumps(self._prepare(str(note.with_suffix("")), field)), "utf-8")
        return json.loads(note.read_text("utf-8"))

    def _prepare(self, directory: str, field: Field) -> str:
        """Write the peer's own format with its own Python; returns the path."""
        shutil.rmtree(directory, ignore_errors=True)  # left by an interrupted run
        module = [self.python or sys.executable, "-m", "benchmarks.peers.plan"]
        command = [*module, self.peer.name, self.written["tar"].path, directory, json.dumps(field.to_options())]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PREPARE_SECONDS, env=child_environment()
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"its files were not written within {_PREPARE_SECONDS:g} s", key="peers") from None
        lines = [line for line in (done.stderr if done.returncode else done.stdout).splitlines() if line.strip()]
        if done.returncode or not lines:
            raise ConfigError(f"its files cannot be written: {lines[-1] if lines else done.returncode}", key="peers")
        return lines[-1]


def main(peer: str, source: str, directory: str, options: str) -> None:
    """Write a peer's own format, and print the path for ``Task.path``."""
    field, write = Field.from_options(json.loads(options)), PEERS[peer].write
    os.makedirs(directory, exist_ok=True)
    with dataload.open(source, decode="auto") as opened:
        print(f"\n{write(opened, field, directory)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
