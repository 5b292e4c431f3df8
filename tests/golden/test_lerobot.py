"""LeRobot's own data sets: every seventh item as LeRobot itself gives it; see lerobot/README.md."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import dataload

ROOT = Path(__file__).parent / "lerobot"
pytest.importorskip("pyarrow")


@pytest.fixture
def root(tmp_path):
    """A copy, because tables of videos are kept beside them."""
    return shutil.copytree(ROOT, tmp_path / "copy")


@pytest.mark.parametrize("kind", ["images", "h264"])
@pytest.mark.parametrize("mode", ["plain", "window"])
def test_items_are_those_of_lerobot(root, kind, mode):
    """Equal, but frames of videos within two grey levels: versions of FFmpeg differ in the conversion to RGB."""
    pytest.importorskip("av" if kind == "h264" else "PIL")
    told, expected = json.loads((ROOT / kind / "expected.json").read_text()), np.load(ROOT / kind / "expected.npz")
    options = {} if mode == "plain" else {"delta_timestamps": told["delta_timestamps"]}
    with dataload.open(root / kind, layout="chw", **options) as source:
        assert len(source) == told["length"]
        for index, task in zip(told["indices"], told["tasks"], strict=True):
            record = source[index]
            assert record["task"] == task
            names = [name for name in expected.files if name.startswith(f"{mode}/{index}/")]
            assert len(names) >= 6
            for name in names:
                found, wanted = np.asarray(record[name.split("/", 2)[2]]), expected[name]
                assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
                most = 2 if kind == "h264" and found.dtype == np.uint8 else 0
                assert np.abs(found.astype(float) - wanted.astype(float)).max() <= most, name


def test_frames_are_exactly_those_of_their_video(root):
    pytest.importorskip("av")
    camera = "observation.images.wrist"
    with dataload.open(root / "h264") as source, dataload.open(root / f"h264/videos/{camera}") as video:
        frames = video.read_batch(np.arange(len(video)), ["frame"])["frame"]
        assert np.array_equal(source.read_batch(np.arange(len(source)), [camera])[camera], frames)


@pytest.mark.parametrize("executor", ["threads", pytest.param("processes", marks=pytest.mark.slow_suite)])
@pytest.mark.usefixtures("fork_server")
@pytest.mark.filterwarnings("ignore:worker processes decode")
def test_a_loader_decodes_each_frame_once(root, executor):
    pytest.importorskip("av")
    windows = {"observation.images.top": [-0.3, 0.0, 0.2], "action": [0.0, 0.1]}
    with dataload.open(root / "h264", delta_timestamps=windows, episodes=[4, 1, 0]) as source:
        assert source.sequence_lengths.tolist() == [1, 27, 20]
        with dataload.Loader(source, batch_size=7, shuffle=True, num_workers=2, executor=executor) as loader:
            batches = [*loader]
        assert sorted(i for batch in batches for i in batch["index"].tolist()) == [*range(47), 85]
        order = {index: row for row, index in enumerate(source.read_batch(np.arange(48), ["index"])["index"].tolist())}
        for batch in batches:
            alone = source.read([order[index] for index in batch["index"].tolist()])
            for name, values in batch.items():
                assert all(np.array_equal(each, record[name]) for each, record in zip(values, alone, strict=True))
