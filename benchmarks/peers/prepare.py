"""``python -m benchmarks.peers.prepare PEER SOURCE DIRECTORY OPTIONS``: write a peer's own format.

Runs in the environment of the peer, so SOURCE is a file of a format that needs no package: a tar archive. OPTIONS are
those of the task, as JSON, see `Field.to_options`. Prints the path for ``Task.path`` as the last line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import dataload
from benchmarks.peers import Peer, get_peer
from benchmarks.peers.field import Field
from dataload.errors import ConfigError
from dataload.sources.base import Source


def prepare(peer: Peer, source: Source[Any], directory: str, field: Field) -> str:
    """Write the records of a source in a peer's own format; returns the path for ``Task.path``."""
    if peer.write is None:
        raise ConfigError(f"{peer.name} has no format of its own: it reads {', '.join(peer.readings)}", key="peer")
    if field.kind not in peer.kinds:
        raise ConfigError(f"{peer.name} holds fields of {', '.join(peer.kinds)}, not of {field.kind}", key="field")
    os.makedirs(directory, exist_ok=True)
    return peer.write(source, field, directory)


def main(peer: str, source: str, directory: str, options: str) -> None:
    field = Field.from_options(json.loads(options))
    # Arrays are decoded from .npy; JPEG files have to stay files.
    choices: dict[str, Any] = {"decode": "auto"} if source.endswith(".tar") and field.kind == "array" else {}
    with dataload.open(source, **choices) as opened:
        print(f"\n{prepare(get_peer(peer), opened, directory, field)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
