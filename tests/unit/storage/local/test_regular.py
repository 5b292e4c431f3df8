"""What is not a regular file is refused at once, wherever a path is opened."""

import contextlib
import json
import os
import re
import socket

import numpy as np
import pytest

import dataload
from dataload import ConfigError
from dataload.compat.torchrecord import Writer, default_data_process_func
from dataload.errors import SourceError
from dataload.loader.failures import Budget, read_excluded
from dataload.sources.array_record.tfds import TfdsSource
from dataload.storage import storage_of
from dataload.storage.local.record_files import open_regular


@pytest.fixture(params=["a FIFO", "a socket", "a device"])
def special(request, tmp_path, monkeypatch):
    """Makes something that is not a file at a path, and says what."""

    def make(name):
        path = tmp_path / name
        if request.param == "a FIFO":
            os.mkfifo(path)
        elif request.param == "a socket":
            monkeypatch.chdir(tmp_path)  # the path of a socket is short
            sockets.append(socket.socket(socket.AF_UNIX))
            sockets[-1].bind(name)
        else:
            path.symlink_to("/dev/zero")
        return str(path), f"it is {request.param}, and only regular files are opened"

    sockets = []
    yield make
    for each in sockets:
        each.close()


def test_a_file_is_opened(tmp_path):
    path = tmp_path / "x"
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    os.write(descriptor, b"abc")
    os.close(descriptor)
    descriptor = open_regular(path)
    assert os.read(descriptor, 9) == b"abc"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")


def test_a_file_that_becomes_a_fifo_meanwhile(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    regular, before = os.stat(tmp_path / "file"), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "stat", lambda _: regular)
    with pytest.raises(OSError, match="it is a FIFO, and only regular files are opened"):
        open_regular(tmp_path / "fifo")
    assert len(os.listdir("/proc/self/fd")) == before


def tfds(path):
    directory = os.path.dirname(path)
    if not path.endswith("dataset_info.json"):
        info = {"fileFormat": "array_record", "name": "demo", "splits": [{"name": "train", "shardLengths": ["1"]}]}
        with open(f"{directory}/dataset_info.json", "w") as stream:
            json.dump(info, stream)
    TfdsSource(directory, split="train")


def beside(kind):
    """Open good data with a file beside them that is special."""

    def opened(path):
        tar, tokens = (os.path.join(os.path.dirname(path), name) for name in ("good.tar", "good.npy"))
        if kind == "index":
            with dataload.create(tar) as writer:
                writer.write({"__key__": "a", "x": b"1"})
            return len(dataload.open(tar, index=path))
        np.save(tokens, np.arange(10, dtype=np.uint16))
        return len(dataload.open(f"tokens:{tokens}", window=2, ends="drop", documents=path))

    return opened


def source(**options):
    return lambda path: len(dataload.open(path, **options))


def weighted(path):
    settings = {"batch_size": 2}
    sampler = {"kind": "weighted", "weights": path}
    dataload.from_config({"source": {"format": "range", "path": "5"}, "sampler": sampler, "loader": settings})


READ = "cannot read {path}: {reason}"
CONFIG = "cannot read the config {path}: {reason}"


def process_line(path):
    with contextlib.chdir(os.path.dirname(path)):  # because spaces split the line
        default_data_process_func(f"{os.path.basename(path)} 3")


REPORT = "error_report must be the path of a file that can be written to, got {path!r}: {reason}"
USES = [
    *(("x", getattr(storage_of("/x"), name), SourceError, READ) for name in ("open", "read", "map")),
    ("x", lambda path: storage_of(path).map(path, mapped=False), SourceError, READ),
    ("x.syr", source(), SourceError, READ),
    ("x.lmdb", source(format="lmdb"), SourceError, READ),
    ("data.mdb", lambda path: source(format="lmdb")(os.path.dirname(path)), SourceError, READ),
    ("x", source(format="torchrecord"), SourceError, READ),
    ("x.tar", source(), SourceError, READ),
    ("x.array_record", source(), SourceError, READ),
    ("x.array_record", source(reader_options=""), SourceError, READ),
    ("x.npy", source(format="tokens", window=2), SourceError, READ),
    ("x.bin", source(format="tokens", window=2, dtype="uint16"), SourceError, READ),
    ("x", source(), SourceError, READ),
    ("x.special", beside("index"), SourceError, READ),
    ("x.special", beside("documents"), SourceError, READ),
    ("dataset_info.json", tfds, SourceError, READ),
    ("features.json", tfds, SourceError, READ),
    ("bad.jsonl", lambda path: Budget(1, path), ConfigError, REPORT),
    ("bad.jsonl", lambda path: read_excluded(path, range(3)), ConfigError, "{path} cannot be read: {reason}"),
    *((f"x.{suffix}", dataload.from_config, ConfigError, CONFIG) for suffix in ("toml", "yaml", "json")),
    ("x.npy", weighted, ConfigError, READ),
    ("x.txt", lambda path: Writer(path, f"{path}-out", 1 << 20).parse_data_list(), SourceError, READ),
    ("x.txt", process_line, OSError, "{reason}"),
]


@pytest.mark.parametrize(("name", "use", "error", "message"), USES)
def test_every_use_of_a_path(special, name, use, error, message):
    path, reason = special(name)
    with pytest.raises(error, match=re.escape(message.format(path=path, reason=reason))):
        use(path)
