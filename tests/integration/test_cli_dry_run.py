"""``dataload convert --dry-run`` and ``--exclude``, and the sizes that a conversion reports."""

import numpy as np
import pytest
from command_line import fail, run

import dataload


@pytest.fixture
def photos(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    for i in range(30):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pillow.fromarray(np.full((40, 40, 3), 8 * i, np.uint8)).save(path)
    (tmp_path / "photos" / "a" / "04.png").write_text("no image")
    (tmp_path / "photos" / "a" / "notes").symlink_to("nowhere")
    return tmp_path / "photos"


def convert(*arguments):
    result = run("convert", *arguments)
    assert result.exit_code == 0, result.output
    return result


def test_a_dry_run_shows_files_sizes_and_failures_and_writes_nothing(tmp_path, photos):
    before = sorted(tmp_path.rglob("*"))
    result = convert(photos, tmp_path / "out.syr", "--shards", 3, "--decode", "auto", "--on-error", "skip", "--dry-run")
    lines = result.stdout.splitlines()
    assert lines[:3] == [f"{tmp_path}/out-0000{i}-of-00003.syr: 10 records" for i in range(3)]
    assert "30 records of the source would become about " in lines[3]
    size = lines[3].partition(" times the ")[2].removesuffix(" of the source")
    assert f"folder: 30 records in 1 shard, {size}\n" in run("inspect", photos).stdout
    assert "warning: of 30 records tried, 1 cannot be converted: they would be skipped" in result.stderr
    assert any(line.strip().startswith("[2] ") and "04.png" in line for line in lines)
    assert lines[-1] == "nothing was written: leave out --dry-run"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_of_a_part_says_what_exists(tmp_path):
    part = ("range:100", tmp_path / "out.tar", "--shards", 4, "--part", "2/2")
    convert(*part)
    lines = convert(*part, "--dry-run").stdout.splitlines()
    assert lines[:2] == [f"{tmp_path}/out-0000{i}-of-00004.tar: 25 records (exists)" for i in (2, 3)]
    assert lines[2].startswith("50 records of the source would become about ")


def test_bad_records_are_left_out_by_their_report(tmp_path, photos):
    report = tmp_path / "bad.jsonl"
    options = ("--decode", "auto", "--on-error", "skip", "--max-bad", 3, "--error-report", report)
    skipped = convert(photos, tmp_path / "a.syr", *options)
    assert "29 records in " in skipped.stdout
    assert " times the " in skipped.stdout
    convert(photos, tmp_path / "b.syr", "--decode", "auto", "--exclude", report)
    with dataload.open(tmp_path / "a.syr") as one, dataload.open(tmp_path / "b.syr") as other:
        assert [record["label"] for record in one] == [record["label"] for record in other]
    convert("range:10", tmp_path / "c.syr", "--exclude", "3,0")
    with dataload.open(tmp_path / "c.syr") as source:
        assert [int(record["index"]) for record in source] == [1, 2, 4, 5, 6, 7, 8, 9]
    message = "--exclude and --error-report contradict each other: the report would number the remaining records"
    refused = fail(2, "convert", photos, tmp_path / "d.syr", "--exclude", report, "--error-report", report)
    assert message in refused.stderr


def test_sizes_are_those_of_the_shards(tmp_path):
    with dataload.create(tmp_path / "data" / "a.syr", shards=2) as writer:
        writer.extend({"x": np.zeros(1000)} for _ in range(10))
    report = convert(tmp_path / "data", tmp_path / "b.syr")
    assert "1.0 times the " in report.stdout
