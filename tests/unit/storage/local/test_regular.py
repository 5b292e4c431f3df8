"""What is not a regular file is refused at once, wherever a path is opened."""

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
from dataload.loader.bad_records import Budget, read_excluded
from dataload.sources.array_record.tfds import TfdsSource
from dataload.storage import storage_of
from dataload.storage.local.regular import open_regular

KINDS = ("a FIFO", "a socket", "a device")


@pytest.fixture(params=KINDS)
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


@pytest.mark.parametrize("mapped", [True, False])
def test_storage(special, mapped):
    path, reason = special("x")
    storage = storage_of(path)
    for attempt in (storage.open, storage.read, lambda path: storage.map(path, mapped=mapped)):
        with pytest.raises(SourceError, match=re.escape(f"cannot read {path}: {reason}")):
            attempt(path)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("x.syr", {}),
        ("x.lmdb", {"format": "lmdb"}),
        ("x", {"format": "torchrecord"}),
        ("x.tar", {}),
        ("x.array_record", {}),
        ("x.array_record", {"reader_options": ""}),
        ("x.npy", {"format": "tokens", "window": 2}),
        ("x.bin", {"format": "tokens", "window": 2, "dtype": "uint16"}),
        ("x", {}),
    ],
    ids=str,
)
def test_every_format(special, name, options):
    path, reason = special(name)
    with pytest.raises(SourceError, match=re.escape(f"cannot read {path}: {reason}")):
        len(dataload.open(path, **options))


def test_files_beside_the_data(special, tmp_path):
    with dataload.create(tmp_path / "x.tar") as writer:
        writer.write({"__key__": "a", "x": b"1"})
    np.save(tmp_path / "t.npy", np.arange(10, dtype=np.uint16))
    path, reason = special("x.special")
    for attempt in (
        lambda: len(dataload.open(tmp_path / "x.tar", index=path)),
        lambda: len(dataload.open(f"tokens:{tmp_path / 't.npy'}", window=2, ends="drop", documents=path)),
    ):
        with pytest.raises(SourceError, match=re.escape(f"cannot read {path}: {reason}")):
            attempt()


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
def test_descriptions_of_tfds(special, tmp_path, name):
    split = {"name": "train", "shardLengths": ["1"]}
    info = {"fileFormat": "array_record", "name": "demo", "splits": [split]}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / name).unlink(missing_ok=True)
    path, reason = special(name)
    with pytest.raises(SourceError, match=re.escape(f"cannot read {path}: {reason}")):
        TfdsSource(tmp_path, split="train")


def test_lmdb_directories(special, tmp_path):
    path, reason = special("data.mdb")
    with pytest.raises(SourceError, match=re.escape(f"cannot read {path}: {reason}")):
        len(dataload.open(tmp_path, format="lmdb"))


def test_reports(special):
    path, reason = special("bad.jsonl")
    with pytest.raises(
        ConfigError,
        match=re.escape(f"error_report must be the path of a file that can be written to, got {path!r}: {reason}"),
    ):
        Budget(1, path)
    with pytest.raises(ConfigError, match=re.escape(f"{path} cannot be read: {reason}")):
        read_excluded(path, range(3))


@pytest.mark.parametrize("suffix", ["toml", "yaml", "json"])
def test_configs(special, suffix):
    path, reason = special(f"x.{suffix}")
    with pytest.raises(ConfigError, match=re.escape(f"cannot read the config {path}: {reason}")):
        dataload.from_config(path)


def test_arrays_of_configs(special):
    path, reason = special("x.npy")
    settings = {
        "source": {"format": "range", "path": "5"},
        "sampler": {"kind": "weighted", "weights": path},
        "loader": {"batch_size": 2},
    }
    with pytest.raises(ConfigError, match=re.escape(f"cannot read {path}: {reason}")):
        dataload.from_config(settings)


def test_lists_and_images_for_torchrecord(special, tmp_path):
    path, reason = special("x.txt")
    with pytest.raises(SourceError, match=re.escape(f"cannot read {path}: {reason}")):
        Writer(path, str(tmp_path / "out"), 1 << 20).parse_data_list()
    with pytest.raises(OSError, match=re.escape(reason)):
        default_data_process_func(f"{path} 3")
