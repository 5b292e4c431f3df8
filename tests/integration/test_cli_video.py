"""Commands that meet videos and robots: what `show` draws, and what `inspect`, `stats` and `verify` say."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("av")
pytest.importorskip("pyarrow")
import command_line
from videos import write_video


@pytest.fixture
def robot(tmp_path):
    return shutil.copytree(Path(__file__).parents[1] / "golden/lerobot/h264", tmp_path / "robot")


def test_an_episode_is_a_strip_for_each_camera_and_curves(robot, tmp_path):
    command_line.run("show", robot, "--records", "0:20", "--html", tmp_path / "page.html")
    head = (tmp_path / "page.html").read_text().partition('<div class="rows')[0]
    assert [part.count("<img") for part in head.split('<div class="strip">')[1:]] == [6, 6]
    curves = {part.partition("</dt>")[0]: part.count("<polyline") for part in head.split("<dt>")[1:]}
    assert curves["observation.state"] == 6
    assert curves["action"] == 2
    assert "timestamp" not in curves
    assert "task" not in curves


def test_a_video_is_a_strip(tmp_path):
    path = write_video(tmp_path / "a.mp4", 9)
    command_line.run("show", path, "--records", "2:6", "--html", tmp_path / "page.html")
    head = (tmp_path / "page.html").read_text().partition('<div class="rows')[0]
    assert (head.count("<img"), head.count("<polyline")) == (4, 0)
    command_line.run("show", path, "--records", "2", "--html", tmp_path / "page.html")
    assert "<img" not in (tmp_path / "page.html").read_text().partition('<div class="rows')[0]


def test_what_commands_say_of_robots_and_videos(robot, tmp_path):
    (robot / ".cache").mkdir()
    (robot / ".cache" / "a.lock").write_bytes(bytes(1 << 20))  # as downloads leave behind: no part of the data
    shown = command_line.run("inspect", robot).stdout
    assert "lerobot: 86 records in 5 shards, 1." in shown
    assert "episode 4        1" in shown
    assert "86 records" in command_line.run("verify", robot).stdout
    path = write_video(tmp_path / "clips" / "a.mp4", 9) if (tmp_path / "clips").mkdir() is None else None
    assert "video: 9 records in 1 shard" in command_line.run("inspect", path).stdout
    assert "0 to 255" in command_line.run("stats", path.parent).stdout
    assert "9 records in 1 file" in command_line.run("verify", path).stdout
