"""The command line as a user runs it: inspect, convert, verify and index."""

import json
import os
import pty
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import typer
from command_line import assert_plain, facts, fail, ok, run
from made_files import pack
from written import written

import dataload
from dataload.cli.app import _HELPS, app
from dataload.cli.output import ProgressBar
from dataload.config import json_schema
from dataload.storage.core import core_name


def process(*arguments, **options):
    """Run the console script in a process of its own, by default with its output in pipes."""
    command = [sys.executable, "-m", "dataload", *map(str, arguments)]
    return subprocess.run(command, **{"capture_output": True, "text": True, "check": False, **options})


@pytest.fixture
def data(tmp_path):
    """A data set of two shards."""
    for shard in range(2):
        with dataload.create(tmp_path / f"a-{shard}.syr") as writer:
            writer.extend(
                {"x": np.full((2, 3), i + 0.5), "y": np.array(i), "name": f"n{i}", "raw": b"\x1b[31m" * 20}
                for i in range(shard * 4, shard * 4 + 4)
            )
    return tmp_path


@pytest.fixture
def damaged(tmp_path):
    """Ten records of text, of which 3 and 7 are no UTF-8."""
    path = written(tmp_path / "damaged.syr", [{"text": f"record {i}"} for i in range(10)])
    content = path.read_bytes()
    for index in (3, 7):
        content = content.replace(f"record {index}".encode(), b"rec\xff\xff\xff %d" % index)
    path.write_bytes(content)
    return path


def test_help_is_there_for_every_command():
    text = ok("--help")
    group = typer.main.get_command(app)
    for command in group.commands:
        assert command in text
        assert "Usage:" in ok(command, "--help")
    assert {name: group.get_command(None, name).help.splitlines()[0] for name in group.commands} == _HELPS
    assert json.loads(ok("schema")) == json_schema()


def test_the_console_script_and_the_module_are_the_same():
    version = f"dataload {dataload.__version__} ({core_name()} core)\n"
    assert process("--version").stdout == ok("--version") == version
    script = Path(sys.executable).with_name("dataload")
    if script.exists():
        assert subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout == version


def test_bad_data_are_exit_code_1_and_cannot_print_control_characters(tmp_path):
    path = tmp_path / "a\x1b[31m\x07.syr"
    path.write_bytes(b"GS")
    assert fail(1, "inspect", path).stderr.startswith(f"error: {tmp_path}/a\\x1b[31m\\x07.syr, byte 0: ")


@pytest.mark.parametrize("arguments", [["--debug", "inspect", "none.syr"], ["inspect", "none.syr", "--debug"]])
def test_debug_shows_the_traceback(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (FileNotFoundError(2, "No such file or directory", "x"), 1, "error: x: No such file or directory\n"),
        (ZeroDivisionError("by 0"), 1, "error: unexpected ZeroDivisionError: by 0; use --debug for the traceback\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (SystemExit(["needs a GPU"]), 1, "error: ['needs a GPU']\n"),
        (SystemExit(3), 3, ""),
        (typer.Abort(), 1, "error: the question has no answer: answer it by an option\n"),
    ],
)
def test_errors_of_others_and_warnings_are_a_line(monkeypatch, error, code, text):
    def end(*_):
        warnings.simplefilter("default")
        warnings.warn("slow to read", UserWarning, stacklevel=1)
        raise error

    monkeypatch.setattr(typer.core.TyperCommand, "invoke", end)
    assert fail(code, "inspect", "range:3").stderr == f"warning: slow to read\n{text}"


def test_a_closed_pipe_is_no_error(data):
    command = f"{sys.executable} -m dataload inspect {data}/a-0.syr --json | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert result.stdout.strip() in ("0", "141"), "0 if all was written before the other end closed"
    assert result.stderr == ""


def test_ctrl_c_during_a_conversion_leaves_no_half_file(data, monkeypatch):
    def stop(self, done, total):
        if done >= 5:
            raise KeyboardInterrupt

    command = ["convert", data / "a-*.syr", data / "b.syr", "--shards", 2]
    with monkeypatch.context() as patch:
        patch.setattr(ProgressBar, "__call__", stop)
        result = run(*command)
    told = "error: interrupted; finished shards are kept: pass --resume to continue\n"
    assert (result.exit_code, result.output) == (130, told)
    left = [".b.syr.convert.json", ".b.syr.convert.log", "a-0.syr", "a-1.syr", "b-00000-of-00002.syr"]
    assert sorted(os.listdir(data)) == left
    assert "4 records from an earlier run" in ok(*command, "--resume")


def test_a_bar_shows_how_much_is_done_and_leaves_the_streams_alone(monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    streams = sys.stdout, sys.stderr
    with ProgressBar("measuring [red]") as bar:
        bar(1234, 5000)
        assert (sys.stdout, sys.stderr) == streams
    shown = capsys.readouterr().err
    assert "measuring [red]" in shown
    assert "1234/5000" in shown


@pytest.mark.slow_suite
def test_progress_and_colour_on_a_terminal_only(data):
    """On a pseudo-terminal stderr has a bar and colours; stdout, a pipe, has none."""
    master, slave = pty.openpty()
    options = {"capture_output": False, "stderr": slave, "env": {**os.environ, "TERM": "xterm-256color"}}
    arguments = "convert", data / "a-*.syr", data / "b.syr"
    try:
        assert_plain(process(*arguments, **options, stdout=subprocess.PIPE).stdout)
        assert process(*arguments, **options).returncode == 2
    finally:
        os.close(slave)
    shown = b""
    while True:
        try:
            shown += (block := os.read(master, 65536))
        except OSError:  # what Linux says when the other end is closed
            break
        if not block:
            break
    os.close(master)
    assert b"converting to syrah" in shown
    assert b"\x1b[31merror: " in shown


def test_inspect(data):
    lines = ok("inspect", data / "a-*.syr").splitlines()
    assert lines[0].startswith("syrah: 8 records in 2 shards, ")
    assert lines[1].startswith("protocols: BatchReader, ColumnReader, Sharded; fingerprint ")
    assert lines[1].endswith(f"; {core_name()} core")
    assert lines[3:7] == [
        "field  dtype    shape   record 0",
        "x      float64  (2, 3)  [0.5, 0.5, 0.5, 0.5, 0.5, 0.5] (2, 3)",
        "y      int64    ()      0",
        "name   str      ()      'n0'",
    ]
    assert lines[7].startswith(r"raw    bytes    ()      b'\x1b[31m\x1b")
    assert lines[7].endswith("... (100 bytes)")
    assert lines[9].split() == ["shard", "records", "size"]
    assert lines[10].split()[:2] == [f"{data}/a-0.syr", "4"]
    assert len(lines) == 12
    for shard in range(2, 11):
        shutil.copy(data / "a-0.syr", data / f"a-{shard}.syr")
    assert ok("inspect", data).splitlines()[-1] == "... and 1 more (--json lists all)"


def test_inspect_as_json(data):
    found = facts("inspect", data, "--field", "x", "--field", "y")
    assert (found["format"], found["records"], found["manifest"]) == ("syrah", 8, [])
    assert found["fields"] == {"x": {"dtype": "float64", "shape": [2, 3]}, "y": {"dtype": "int64", "shape": []}}
    paths = [data / f"a-{shard}.syr" for shard in range(2)]
    assert found["shards"] == [{"path": str(path), "records": 4, "bytes": path.stat().st_size} for path in paths]
    assert found["bytes"] == sum(path.stat().st_size for path in paths)
    assert found["protocols"] == ["BatchReader", "ColumnReader", "Sharded"]
    assert found["sample"] == {"x": "[0.5, 0.5, 0.5, 0.5, 0.5, 0.5] (2, 3)", "y": "0"}
    assert found["fingerprint"] == dataload.open(data, fields=["x", "y"]).fingerprint()
    found = facts("inspect", f"syrah:{data}/a-0.syr", "-o", "shapes.x=[3, 2]")
    assert found["fields"]["x"] == {"dtype": "float64", "shape": [3, 2]}


def test_inspect_shows_the_rest_when_there_is_no_good_record_0(tmp_path):
    with dataload.create(tmp_path / "empty.lmdb"):
        pass
    assert ok("inspect", tmp_path / "empty.lmdb").startswith("lmdb: 0 records in 1 shard")
    assert facts("inspect", tmp_path / "empty.lmdb")["sample"] is None
    path = written(tmp_path / "a.syr", [{"text": "abc"}])
    path.write_bytes(path.read_bytes().replace(b"abc", b"\xff\xfe\xfd"))
    text = ok("inspect", path)
    assert "text   str    ()" in text
    assert "record 0: cannot be read: " in text


def test_inspect_of_other_kinds_of_data(tmp_path):
    lines = ok("inspect", "range:10", "-o", "start=3").splitlines()
    assert (lines[0], lines[-1].split()) == ("range: 7 records in 1 shard, 0 bytes", ["index", "int64", "()", "3"])
    lines = ok("inspect", Path(__file__).parents[1] / "golden/mds/all").splitlines()
    assert lines[0] == "mds: 9 records in 3 shards, 6.5 kB"
    assert "json unknown ? {'a': '[0, None]', 'b': \"'x'\"}" in [" ".join(line.split()) for line in lines]
    assert any(line.endswith("985 bytes") and "shard.00002.mds" in line for line in lines)
    written(tmp_path / "a.lmdb", [b"one", b"\x00" * 200])
    text = ok("inspect", tmp_path / "a.lmdb")
    assert text.startswith("lmdb: 2 records in 1 shard, ")
    assert "note: records are ordered by key, compared by number" in text
    assert "no fields: records are plain bytes; use --codec to decode them into fields" in text
    assert "record 0: b'one'" in text


def test_convert(data):
    text = ok("convert", data / "a-*.syr", data / "b.tar", "--shards", 2)
    assert text.startswith(f"8 records in {data}/b-{{00000..00001}}-of-00002.tar (")
    found = dataload.open(data / "b-*.tar", decode="auto")
    assert found.shard_lengths == (4, 4)
    np.testing.assert_array_equal(found[5]["x"], np.full((2, 3), 5.5))
    ok("convert", data / "b-*.tar", data / "c.syr", "--decode", "auto", "--field", "y", "--field", "name")
    assert list(dataload.open(data / "c.syr")) == [{"y": i, "name": f"n{i}"} for i in range(8)]
    ok("convert", data / "a-0.syr", data / "f.tar", "--to-option", "index=false")
    assert not (data / "f.idx").exists()
    ok("convert", data / "a-*.syr", data / "p{shard:02d}.syr", "--records-per-shard", 3)
    assert dataload.open(data / "p{00..02}.syr").shard_lengths == (2, 3, 3)


def test_convert_with_codecs(data):
    assert "note" not in ok("convert", data / "a-*.syr", data / "b.lmdb", "--codec", "msgpack")
    assert dataload.open(data / "b.lmdb", codec="msgpack")[2]["name"] == "n2"
    ok("convert", data / "b.lmdb", data / "c.lmdb", "--codec", "msgpack", "--to-codec", "npz")
    assert dataload.open(data / "c.lmdb", codec="npz")[2]["name"] == "n2"
    ok("convert", data / "c.lmdb", f"syrah:{data}/d", "--codec", "npz")
    ok("convert", data / "d", data / "d.syr", "--from", "syrah", "--format", "syrah")
    assert dataload.open(data / "d.syr")[2]["name"] == "n2"
    text = ok("convert", data / "d.syr", data / "e.lmdb")
    assert text.startswith("note: records are encoded with the codec 'tensorprotos'")


def test_convert_again(data):
    arguments = ("convert", data / "a-*.syr", data / "b.syr")
    ok(*arguments)
    fail(2, *arguments)
    assert "8 records from an earlier run" in ok(*arguments, "--resume")
    ok(*arguments, "--overwrite")
    result = fail(2, "convert", data / "a-0.syr", data / "b.syr", "--resume")
    assert "records: 8 when it began, 4 now" in result.stderr


def test_convert_keeps_the_key_if_asked(tmp_path):
    written(tmp_path / "a.tar", [{"__key__": "k", "txt": "t"}])
    text = ok("convert", tmp_path / "a.tar", tmp_path / "a.syr")
    assert text.startswith("note: the field '__key__' of tar samples is dropped; --keep-key keeps it\n")
    ok("convert", tmp_path / "a.tar", tmp_path / "b.syr", "--keep-key")
    assert dataload.open(tmp_path / "b.syr")[0] == {"__key__": "k", "txt": "t"}


def bad(*arguments):
    """Return the places of the bad records that a verification finds, and its whole report."""
    report = json.loads(fail(1, "verify", *arguments, "--json").stdout)
    return [(Path(each["path"]).name, each["index"], each["record"]) for each in report["bad"]], report


def test_verify_names_every_bad_record(damaged, data):
    assert ok("verify", data / "a-*.syr") == "8 records in 2 files: all can be read\n"
    report = facts("verify", data / "a-*.syr")
    assert report == {"path": f"{data}/a-*.syr", "files": 2, "records": 8, "ok": True, "bad": []}
    result = fail(1, "verify", damaged)
    first, second = result.stdout.splitlines()
    assert first.startswith(f"[3] {damaged}, byte ")
    assert ", record 3: " in first
    assert ", record 7: " in second
    assert result.stderr == "error: 2 bad in 10 records read\n"
    result = fail(1, "verify", damaged, "--limit", 1)
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr.endswith("; stopped at --limit\n")
    places, report = bad(damaged)
    assert (places, report["ok"], report["records"], report["files"]) == (
        [("damaged.syr", 3, 3), ("damaged.syr", 7, 7)], False, 10, 1
    )  # fmt: skip
    content = damaged.read_bytes()
    for finding in report["bad"]:
        assert finding["offset"] == content.index(b"rec\xff\xff\xff %d" % finding["index"]) + 3
        assert finding["error"] == "CorruptFileError"
        assert finding["cause"].startswith(f"{damaged}, byte ")


@pytest.mark.filterwarnings("always")
def test_verify_says_each_time_that_an_archive_may_have_been_cut_off(tmp_path):
    whole, cut = tmp_path / "whole.tar", tmp_path / "cut.tar"
    pack(whole, {f"{n}.txt": b"x" for n in range(2200)})  # so many that their table is kept
    cut.write_bytes(whole.read_bytes()[: 2100 * 1024])
    os.utime(cut, (1, 1))
    for _ in range(2):
        result = run("verify", cut)
        assert result.stdout == "2,100 records in 1 file: all can be read\n"
        assert f"{cut} ends without blocks of zeros: it may have been cut off" in result.stderr
        with warnings.catch_warnings(record=True):
            assert len(dataload.open(cut)) == 2100
    assert ok("verify", whole) == "2,200 records in 1 file: all can be read\n"


def test_verify_counts_records_over_all_files_and_parts(damaged, data):
    places, report = bad(data)
    assert (places, report["records"]) == ([("damaged.syr", 11, 3), ("damaged.syr", 15, 7)], 18)
    assert ok("verify", data, "--part", "1/2") == "4 records in 1 file: all can be read\n"
    places, report = bad(data, "--part", "2/2")
    assert (report["files"], report["records"]) == (2, 14)
    # The records of the first part were not counted.
    assert places == [("damaged.syr", None, 3), ("damaged.syr", None, 7)]
    assert bad(damaged, "--part", "1/1")[0] == [("damaged.syr", 3, 3), ("damaged.syr", 7, 7)]
    damaged.rename(data / "0.syr")
    assert bad(data, "--part", "1/2")[0] == [("0.syr", 3, 3), ("0.syr", 7, 7)]


def test_verify_goes_on_when_a_whole_file_is_bad(damaged, data):
    (data / "b.syr").write_bytes(b"GS")
    places, report = bad(data)
    # Behind a file that does not open nobody knows the number of a record in the data set.
    assert places == [("b.syr", None, None), ("damaged.syr", None, 3), ("damaged.syr", None, 7)]
    assert report["records"] == 18
    only = fail(1, "verify", data / "b.syr")
    assert f"{data}/b.syr, byte 0: " in only.stdout
    assert only.stderr == "error: 1 bad and no record was read\n"


def refuse_seven(data):
    if data == b"7":
        raise KeyError("seven")
    return {"n": int(data)}


def test_verify_reports_what_a_users_codec_raises(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "users_codec", sys.modules[__name__])
    written(tmp_path / "a.lmdb", [b"%d" % i for i in range(10)])
    places, report = bad(tmp_path / "a.lmdb", "--codec", "users_codec:refuse_seven")
    assert places == [("data.mdb", 7, 7)]
    assert "KeyError: 'seven'" in report["bad"][0]["cause"]


def test_a_missing_package_is_not_bad_data(tmp_path, monkeypatch):
    written(tmp_path / "a.arrow", [{"x": 1}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs pyarrow: pip install" in fail(2, "verify", tmp_path / "a.arrow").stderr
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "needs ray: pip install 'dataload[ray]'" in fail(2, "verify", tmp_path, "--engine", "ray").stderr


def write_tar(path, count=3):
    written(path, [{"txt": f"t{i}", "cls": i} for i in range(count)], index=False)


def test_index(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tar("a-0.tar", 3)
    write_tar("a-1.tar", 1)
    assert ok("index", "a-*.tar") == "a-0.tar: 3 samples\na-1.tar: 1 sample\n4 samples in 2 of 2 archives\n"
    assert Path("a-0.idx").read_text().splitlines()[0] == "v1.2 3"
    assert ok("index", "a-0.tar") == "a-0.tar: 3 samples\n", "an index is written anew"
    Path("out").mkdir()
    ok("index", "a-{0..1}.tar", "-d", "out")
    assert sorted(os.listdir("out")) == ["a-0.idx", "a-1.idx"]
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "a-0.tar", tmp_path / "other")
    error = fail(2, "index", "a-0.tar", "other/a-0.tar", "-d", "out").stderr
    assert "a-0.idx would be the index of 2 archives" in error, "that of the last one was left"


def test_index_goes_on_after_a_bad_archive(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tar("a.tar")
    write_tar("c.tar")
    Path("b.tar").write_bytes(Path("a.tar").read_bytes()[:513])
    result = fail(1, "index", "a.tar", "none-*.tar", "b.tar", "c.tar")
    assert result.stdout == "a.tar: 3 samples\nc.tar: 3 samples\n6 samples in 2 of 4 archives\n"
    errors = result.stderr.splitlines()
    assert "none-*.tar" in errors[0]
    assert errors[1].startswith("error: b.tar, byte ")
    assert sorted(os.listdir()) == ["a.idx", "a.tar", "b.tar", "c.idx", "c.tar"]


def test_index_of_samples_that_are_torn_apart(tmp_path):
    path = pack(tmp_path / "a.tar", dict.fromkeys(("a.txt", "b.txt", "a.cls"), b"1"))
    assert "byte 2048: sample 'a'" in fail(1, "index", path).stderr
    assert not (tmp_path / "a.idx").exists()
    assert ok("index", path, "--no-strict") == f"{path}: 3 samples\n"


def test_index_writes_manifests(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("t-0", "t-1", "v"):
        written(f"{name}.array_record", [{"x": i} for i in range(3)], codec="npz")
    text = ok("index", "--manifest", "t-*.array_record", "--codec", "npz")
    assert text == "./dataload.json: t-{0..1}.array_record: 6 records in 2 shards (262.1 kB)\n"
    assert "v.array_record: 3 records in 1 shard" in ok("index", "--manifest", "v.array_record")
    assert len(ok("index", "--manifest", ".").splitlines()) == 2
    Path("v.array_record").unlink()
    assert len(ok("index", "--manifest", ".").splitlines()) == 1
    assert dataload.open(".")[5] == {"x": 2}, "the manifest no longer lists the other, and has the codec"
