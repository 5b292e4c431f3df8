"""LeRobot data sets: windows, episodes, and metadata that are wrong."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")
import command_line
import pyarrow as pa
import pyarrow.parquet as pq
from lerobots import write_lerobot
from object_server import FileServer

import dataload
from dataload import ConfigError, CorruptFileError
from dataload.convert.indexing import index_shards
from dataload.errors import UnsupportedFormatError

GOLDEN = Path(__file__).parents[3] / "golden" / "lerobot" / "h264"
LENGTHS = [4, 1, 6, 3, 2]
STATE = np.arange(16 * 2, dtype=np.float32).reshape(16, 2)


@pytest.fixture
def directory(tmp_path):
    write_lerobot(tmp_path / "set", LENGTHS, {"state": STATE, "action": -STATE[:, :1]})
    return tmp_path / "set"


def test_windows_against_a_model(directory):
    offsets = [-0.2, 0.0, 0.1, 0.5]
    with dataload.open(directory, delta_timestamps={"state": offsets}) as source:
        assert source.fields["state"].shape == (4, 2)
        assert source.fields["state_is_pad"].shape == (4,)
        batch = source.read_batch(np.arange(16))
        row = 0
        for episode, length in enumerate(LENGTHS):
            for i in range(length):
                wanted = [i + round(offset * 10) for offset in offsets]
                inside = [min(max(at, 0), length - 1) for at in wanted]
                assert np.array_equal(batch["state"][row], STATE[[row - i + at for at in inside]])
                assert batch["state_is_pad"][row].tolist() == [a != b for a, b in zip(wanted, inside, strict=True)]
                assert batch["task"][row] == ("walk", "stand")[episode % 2]
                row += 1
        assert np.array_equal(batch["action"][:, 0] if batch["action"].ndim > 1 else batch["action"], -STATE[:, 0])
    with dataload.open(directory, delta_timestamps={"task": [0, 0.1]}) as source:
        assert [record["task"] for record in source.read([0, 3])] == [("walk", "walk"), ("walk", "walk")]
        assert source[4]["task"] == ("stand", "stand")


def test_episodes_fields_and_copies(directory):
    path = directory / "meta/tasks.parquet"
    pq.write_table(pq.read_table(path).rename_columns(["task_index", "task"]), path)  # as LeRobot came to name it
    with dataload.open(directory, episodes=[3, 1], fields=["task", "state"]) as source:
        assert len(source) == 4
        assert source.shard_lengths == (3, 1) == source.groups
        assert [*source.fields] == ["task", "state"]
        again = pickle.loads(pickle.dumps(source))
        for each in (source, again):
            assert [record["state"].tolist() for record in each] == STATE[[11, 12, 13, 4]].tolist()
            assert [record["task"] for record in each] == ["stand"] * 4
        assert again.fingerprint() == source.fingerprint()
        assert source.locate(3).record == 4
        with dataload.open(directory, episodes=[1, 3]) as other:
            assert other.fingerprint() != source.fingerprint()
        again.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"episodes": [n]}, rf"episodes are numbers below 5, at least one, got \[{n}\]") for n in (5, -1)),
        ({"episodes": []}, "at least one"),
        ({"delta_timestamps": {"state": [0.04]}}, r"delta_timestamps of 'state' must be multiples of 1/10 s"),
        *(({"delta_timestamps": {"state": each}}, "at least one") for each in ([], ())),
        ({"delta_timestamps": {"stat": [0.0]}}, "has no field 'stat': did you mean 'state'"),
        ({"fields": ["actoin"]}, "has no field 'actoin'"),
        ({"layout": "cwh"}, "layout"),
    ],
)
def test_wrong_options(directory, options, message):
    with pytest.raises(ConfigError, match=message):
        dataload.open(directory, **options)


def test_a_directory_has_no_shards_and_is_opened_alone(directory):
    with pytest.raises(ConfigError, match="a manifest does not describe"):
        index_shards(str(directory))
    assert "state" in command_line.run("stats", directory).stdout
    with pytest.raises(ConfigError, match=r"join several with dataload\.concat"):
        dataload.open([directory, directory], format="lerobot")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"info": {"data_path": "../data/file-{file_index:03d}.parquet"}}, "not the name of a file below"),
        ({"info": {"features": None}}, "not a description of a LeRobot data set"),
        *(({"info": {"fps": fps}}, f"fps is {fps}") for fps in (0, 1e6)),
        ({"episodes": {"dataset_to_index": np.array([4, 5, 11, 14, 17])}}, "do not follow one another"),
        ({"episodes": {"length": np.array([4, 1, 6, 3, 3]), "dataset_to_index": np.array([4, 5, 11, 14, 17])}},
         "the tables have 16 records, and the episodes 17"),
        ({"episodes": {"episode_index": np.array([0, 1, 2, 3, 5])}}, "episodes are not numbered from 0"),
        ({"episodes": {"length": np.array([4, 0, 7, 3, 2]), "dataset_to_index": np.array([4, 4, 11, 14, 16])}},
         "or one has no records"),
    ],
)  # fmt: skip
def test_metadata_that_contradict_each_other(tmp_path, wrong, message):
    write_lerobot(tmp_path / "set", LENGTHS, {"state": STATE}, **wrong)
    with pytest.raises(CorruptFileError, match=message):
        dataload.open(tmp_path / "set")


def test_wrong_numbers_at_a_url(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_lerobot(tmp_path / "set", LENGTHS, {"state": STATE}, info={"total_episodes": 5, "chunks_size": 0})
    with FileServer(tmp_path / "set") as server, pytest.raises(CorruptFileError, match="ZeroDivisionError"):
        dataload.open(server.endpoint, format="lerobot")


def test_other_versions_name_the_converter(tmp_path):
    write_lerobot(tmp_path / "set", LENGTHS, {"state": STATE}, info={"codebase_version": "v2.1"})
    command = "convert_dataset_v21_to_v30 --push-to-hub=false --repo-id=ORG/NAME --root="
    with pytest.raises(
        UnsupportedFormatError, match=rf"'v2\.1', and dataload reads 'v3\.0'.*{command}{tmp_path / 'set'}"
    ):
        dataload.open(tmp_path / "set")


def test_golden_statistics_and_sizes(tmp_path):
    root = shutil.copytree(GOLDEN, tmp_path / "robot")
    with dataload.open(root, video={"size": (24, 32)}) as source:
        assert source.stats["action"]["mean"].shape == (2,)
        assert source.groups == (*[2] * 23, 1, 2, 2, 1, *[2] * 16, 1, 1), "and episodes of 20, 27, 5, 33 and 1"
        assert source[3]["observation.images.top"].shape == (24, 32, 3)
        with dataload.open(root) as other:
            assert other.fingerprint() != source.fingerprint()
    with dataload.open(root, layout="chw", video={"frames": "gray", "size": (24, 32)}) as source:
        shapes = {source[3]["observation.images.top"].shape, source.fields["observation.images.top"].shape}
        assert shapes == {(24, 32)}


def edit_episodes(root, change):
    """Write the table of episodes again: `change` returns the rows of each file."""
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    for number, table in enumerate(change(pq.read_table(path).to_pandas())):
        pq.write_table(pa.Table.from_pandas(table), path.with_name(f"file-{number:03d}.parquet"))


@pytest.mark.slow_suite
def test_records_do_not_depend_on_the_division_into_files(tmp_path):
    original, root = (shutil.copytree(GOLDEN, tmp_path / name) for name in ("original", "divided"))
    for video in root.glob("videos/*/chunk-000/file-000.mp4"):
        shutil.copy(video, video.with_name("file-001.mp4"))

    def divide(table):
        for camera in ("top", "wrist"):
            table[f"videos/observation.images.{camera}/file_index"] = [0, 0, 1, 1, 0]
        return table[3:], table[:3]

    edit_episodes(root, divide)
    (root / "data/chunk-000/file-000.parquet").rename(root / "data/0-0.parquet")
    info = json.loads((root / "meta/info.json").read_text())
    info["data_path"] = "data/{chunk_index}-{file_index}.parquet"
    (root / "meta/info.json").write_text(json.dumps(info))
    for episodes in (None, [0, 3]):
        with dataload.open(original, episodes=episodes) as one, dataload.open(root, episodes=episodes) as other:
            expected, found = (each.read_batch(np.arange(len(one))) for each in (one, other))
            assert found.keys() == expected.keys()
            assert all(np.array_equal(found[name], expected[name]) for name in found)
            assert other.groups == one.groups != one.shard_lengths


@pytest.mark.parametrize(("frames", "is_wrong"), [(-0.09, False), (0.09, False), (0.5, True), (1, True)])
def test_times_of_frames_have_a_tolerance(tmp_path, frames, is_wrong):
    root, camera = shutil.copytree(GOLDEN, tmp_path / "robot"), "observation.images.top"

    def shift(table):
        table.loc[4, f"videos/{camera}/from_timestamp"] += frames / 10
        return [table]

    with dataload.open(root) as source:
        expected = source[85][camera]
    edit_episodes(root, shift)
    with dataload.open(root) as source:
        if is_wrong:
            with pytest.raises(CorruptFileError, match=rf"'{camera}' is within 0\.01 s of a record of episode 4"):
                source[0]
        else:
            assert np.array_equal(source[85][camera], expected)


@pytest.mark.slow_suite
def test_data_sets_at_urls(tmp_path, monkeypatch, object_server):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = shutil.copytree(GOLDEN, tmp_path / "robot")
    bucket = object_server.bucket()
    object_server.put_directory(bucket, root, "robot/")
    at_store = f"{object_server.url(bucket)}/robot", {"storage_options": object_server.storage_options()}
    windows = {"observation.images.top": [-0.1, 0.0], "action": [0.0, 0.1]}
    with FileServer(root) as server, dataload.open(root, delta_timestamps=windows) as here:
        for url, options in (at_store, (server.endpoint, {"format": "lerobot"})):
            with dataload.open(url, delta_timestamps=windows, **options) as source:
                assert source.fingerprint() == here.fingerprint()
                assert source.stats.keys() == here.stats.keys()
                with dataload.Loader(source, batch_size=16, shuffle=True, num_workers=2, epochs=1) as loader:
                    batches = [*loader]
                for batch in batches:
                    expected = here.read_batch(batch["index"])
                    assert all(np.array_equal(values, expected[name]) for name, values in batch.items())
                assert sum(len(batch["index"]) for batch in batches) == len(here)
