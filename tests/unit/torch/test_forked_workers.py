"""Sources that were read are read again by workers that are forked, ours and torch's; or the error says what to do."""

from pathlib import Path

import numpy as np
import pytest
import tables  # noqa: F401 - tests/support: opens the pipe of pyarrow, which stays
from videos import write_video

import dataload
from dataload.sources.registry import built_in_formats

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402 - skipped where torch is missing

from dataload.torch import DataLoader  # noqa: E402

GOLDEN = Path(__file__).parents[2] / "golden"
MADE_BY_OTHERS = {
    "wids": GOLDEN / "wids/shards.json",
    "tfds": GOLDEN / "tfds/demo/1.0.0",
    "mds": GOLDEN / "mds/all",
    "lerobot": GOLDEN / "lerobot/images",
    "hugging_face": GOLDEN / "hugging_face/saved",
    "memory": [{"x": 1}, {"x": 2}],
    "range": "4",
}
CODEC = {"lmdb": "msgpack", "array_record": "msgpack"}
OPTIONS = {
    **{name: {"codec": codec} for name, codec in CODEC.items()},
    "tokens": {"window": 4},
    "folder": {"pattern": "{key}.*"},
    "tfds": {"split": "train"},
}


def opened(entry, folder):
    """Return a small source of a format."""
    path = MADE_BY_OTHERS.get(entry.name, folder / f"x{(*entry.suffixes, '')[0]}")
    if entry.name == "csv":
        path.write_text("a,b\n" + "1,x\n2,y\n" * 4)
    elif entry.name == "text":
        path = folder / "x.txt"
        path.write_text("a text")
    elif entry.name == "video":
        path = write_video(folder / "x.mp4", 8)
    elif entry.name == "folder":
        np.save(folder / "0.a.npy", np.arange(3))
        path = folder
    elif entry.name == "tokens":
        path = folder / "x.npy"
        np.save(path, np.arange(32, dtype=np.uint16))
    elif entry.name not in MADE_BY_OTHERS:
        settings = {"codec": CODEC[entry.name]} if entry.name in CODEC else {}
        with dataload.create(path, format=entry.name, **settings) as writer:
            writer.extend({"x": np.arange(3) + i, "n": i} for i in range(8))
    return dataload.open(path, format=entry.name, **OPTIONS.get(entry.name, {}))


class Sources(list):
    """The first records of each source, as text, or the text of the error."""

    def __getitem__(self, index):
        source = super().__getitem__(index)
        try:
            return repr(source.__getitems__([*range(len(source))][:8]))
        except Exception as error:
            return str(error)


@pytest.mark.slow_suite
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_every_format_is_read_in_forked_workers(tmp_path):
    names, sources = [entry.name for entry in built_in_formats()], Sources()
    for entry in built_in_formats():
        (tmp_path / entry.name).mkdir()
        sources.append(opened(entry, tmp_path / entry.name))
    expected = [sources[index] for index in range(len(sources))]
    settings = {"num_workers": 1, "collate_fn": list, "multiprocessing_context": "fork", "timeout": 30}
    for loader in (data.DataLoader, DataLoader):
        (found,) = loader(sources, len(sources), **settings)
        for name, text, same in zip(names, found, expected, strict=True):
            assert text == same, name
