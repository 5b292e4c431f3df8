"""``python -m dataload.bench.peers.prepare PEER SOURCE DIRECTORY OPTIONS``: write a peer's own format.

Runs in the environment of the peer, so SOURCE is a file of a format that it can read: a tar archive needs no package.
OPTIONS are those of the task, as JSON, see `Field.to_options`. Writes the path for ``Task.path`` as the last line of
standard output.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import dataload
from dataload.bench.peers import Peer, get_peer
from dataload.bench.peers.reading import Field
from dataload.errors import ConfigError
from dataload.sources.base import Source

__all__ = ["main", "prepare"]

_BLOCK = 64


def prepare(peer: Peer, source: Source[Any], directory: str, field: Field) -> str:
    """Write the records of a source in the format of a peer.

    Args:
        peer: It has a format of its own.
        source: Its records are bytes of the field, or have it; a JPEG file is not decoded.
        directory: Where to write; made if it is not there.
        field: What the records hold.

    Returns:
        The path for ``Task.path``.

    Raises:
        ConfigError: The peer has no format of its own, or cannot hold such fields.
    """
    if peer.prepare is None:
        raise ConfigError(f"{peer.name} has no format of its own: it reads {', '.join(peer.readings)}", key="peer")
    if field.kind not in peer.kinds:
        raise ConfigError(f"{peer.name} holds fields of {', '.join(peer.kinds)}, not of {field.kind}", key="field")
    os.makedirs(directory, exist_ok=True)
    module, _, name = peer.prepare.partition(":")
    return getattr(importlib.import_module(module), name)(_values(source, field), field, directory, len(source))


def _values(source: Source[Any], field: Field) -> Iterator[Any]:
    """The values of the field: arrays, or bytes."""
    decode = field.decoder()
    for start in range(0, len(source), _BLOCK):
        for record in source.read(range(start, min(start + _BLOCK, len(source)))):
            value = record[field.name] if isinstance(record, dict) else record
            yield decode(value) if field.kind == "array" and isinstance(value, bytes) else value


def main(peer: str, source: str, directory: str, options: str) -> None:
    """Write what ``PEER SOURCE DIRECTORY OPTIONS`` say."""
    field = Field.from_options(json.loads(options))
    # Arrays come out of an archive decoded from .npy; JPEG files have to stay what they are.
    choices: dict[str, Any] = {"decode": "auto"} if source.endswith(".tar") and field.kind == "array" else {}
    with dataload.open(source, **choices) as opened:
        path = prepare(get_peer(peer), opened, directory, field)
    sys.stdout.write(f"\n{path}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
