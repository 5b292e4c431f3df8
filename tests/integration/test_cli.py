"""The command line as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import dataload
from dataload.cli.app import _HELPS, app
from dataload.config import json_schema
from dataload.storage.core import core_name


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def ok(*arguments):
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert_plain(result.stdout)
    return result.stdout


def fail(code, *arguments):
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert_plain(result.output)
    return result


def assert_plain(text):
    """No control characters, which is what a pipe and a log file want."""
    assert not [c for c in text if not c.isprintable() and c != "\n"], text


def process(*arguments, **options):
    """The console script, in a process of its own, its output in pipes."""
    command = [sys.executable, "-m", "dataload", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.fixture
def data(tmp_path):
    """A data set of two shards, and a broken one."""
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
    path = tmp_path / "damaged.syr"
    with dataload.create(path) as writer:
        writer.extend({"text": f"record {i}"} for i in range(10))
    content = path.read_bytes()
    for index in (3, 7):
        content = content.replace(f"record {index}".encode(), b"rec\xff\xff\xff %d" % index)
    path.write_bytes(content)
    return path


# The whole


def test_help_is_there_for_every_command():
    text = ok("--help")
    for command in typer.main.get_command(app).commands:
        assert command in text
        assert "Usage:" in ok(command, "--help")
    commands = typer.main.get_command(app).commands
    assert {name: command.help.splitlines()[0] for name, command in commands.items()} == _HELPS
    assert json.loads(ok("schema")) == json_schema()


def test_the_console_script_and_the_module_are_the_same():
    assert process("--version").stdout == f"dataload {dataload.__version__} ({core_name()} core)\n"
    script = Path(sys.executable).with_name("dataload")
    if script.exists():
        assert subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout.startswith(
            "dataload"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frob"], "error: No such command 'frob'"),
        (["inspect"], "error: Missing argument 'PATH'"),
        (["inspect", "--frob", "x"], "error: No such option: --frob"),
        (["inspect", "x", "--format", "syra"], "did you mean 'syrah'?"),
        (["inspect", "none.syr"], "none.syr"),
        (["inspect", "*.none"], "*.none"),
        (["inspect", "range:10", "-o", "stp=2"], "did you mean 'step'?"),
        (["inspect", "range:10", "-o", "step"], "'step'"),
        (["inspect", "range:10", "-o", "a=1", "-o", "a.b=1"], "error: 'a.b=1': 'a' already has a value"),
        (["verify", "range:3", "--limit", "0"], "error: Invalid value for '--limit'"),
        (["inspect", "x.lmdb", "--codec", "math:nothing"], "math has no 'nothing'"),
        (["inspect", "x.lmdb", "--decode", "a=b", "--decode", "c"], "error: --decode 'c': pass one decoder for all"),
        (["convert", "range:3", "out.none"], "'out.none'"),
        (["convert", "range:3", "file/out.syr"], "error: cannot write to the directory file: file is no directory"),
        (["convert", "range:3", "x.lmdb"], "exists: choose another name, or pass --overwrite to replace it"),
        (["convert", "range:3", "c.tar", "--to-option", "indx=false"], "did you mean 'index'?"),
        (["index", "-d", "none", "a.tar"], "error: there is no directory none"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.lmdb").mkdir()
    (tmp_path / "file").touch()
    result = fail(2, *arguments)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert {*os.listdir(tmp_path)} == {"file", "x.lmdb"}


def test_bad_data_are_exit_code_1_and_cannot_print_control_characters(tmp_path):
    path = tmp_path / "a\x1b[31m\x07.syr"
    path.write_bytes(b"GS")
    result = fail(1, "inspect", path)
    assert result.stderr.startswith(f"error: {tmp_path}/a\\x1b[31m\\x07.syr, byte 0: ")


def test_what_the_system_refuses_is_said(data):
    target = data / "a-0.syr"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dataload.convert.journal._size", lambda _: os.open(data / "none", os.O_RDONLY))
        result = fail(1, "convert", target, data / "b.syr")
    assert result.stderr == f"error: {data}/none: No such file or directory\n"


@pytest.mark.parametrize("place", ["first", "last"])
def test_debug_shows_the_traceback(place):
    arguments = ["inspect", "none.syr"]
    result = run("--debug", *arguments) if place == "first" else run(*arguments, "--debug")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_an_unexpected_error_says_how_to_see_more(monkeypatch, data):
    def explode(*_):
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("dataload.cli.inspect._facts", explode)
    result = fail(1, "inspect", data / "a-0.syr")
    assert result.stderr == "error: unexpected ZeroDivisionError: by nothing; use --debug for the traceback\n"


def test_warnings_are_a_line_and_ctrl_c_is_130(monkeypatch, data):
    def warn(*_):
        warnings.simplefilter("default")
        warnings.warn("slow to read", UserWarning, stacklevel=1)
        raise KeyboardInterrupt

    monkeypatch.setattr("dataload.cli.inspect._facts", warn)
    assert fail(130, "inspect", data / "a-0.syr").stderr == "warning: slow to read\n"


def test_without_typer_it_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from dataload.__main__ import main; sys.exit(main())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "error: the command line needs typer: pip install 'dataload[cli]' (or only typer)\n"


def test_a_closed_pipe_is_no_error(data):
    command = f"{sys.executable} -m dataload inspect {data}/a-0.syr --json | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert result.stdout.strip() in ("0", "141"), "0 if all was written before the other end closed"
    assert result.stderr == ""


@pytest.mark.slow
def test_ctrl_c_during_a_conversion_leaves_no_half_file(data):
    code = (
        "import os, signal, sys\n"
        "from dataload.cli.output import ProgressBar\n"
        "def stop(self, done, total):\n"
        "    if done >= 5: os.kill(os.getpid(), signal.SIGINT)\n"
        "ProgressBar.__call__ = stop\n"
        "from dataload.__main__ import main\n"
        "sys.exit(main())\n"
    )
    arguments = ["convert", str(data / "a-*.syr"), str(data / "b.syr"), "--shards", "2"]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")
    assert sorted(os.listdir(data)) == [".b.syr.convert.json", "a-0.syr", "a-1.syr", "b-00000-of-00002.syr"]
    assert "4 records from an earlier run" in ok("convert", data / "a-*.syr", data / "b.syr", "--shards", 2, "--resume")


# inspect


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dataload.cli.inspect._SHOWN_SHARDS", 1)
        assert ok("inspect", data).splitlines()[-1] == "... and 1 more (--json lists all)"


def test_inspect_as_json(data):
    facts = json.loads(ok("inspect", data, "--json", "--field", "x", "--field", "y"))
    assert (facts["format"], facts["records"]) == ("syrah", 8)
    assert facts["fields"] == {"x": {"dtype": "float64", "shape": [2, 3]}, "y": {"dtype": "int64", "shape": []}}
    assert facts["shards"][1] == {
        "path": f"{data}/a-1.syr",
        "records": 4,
        "bytes": (data / "a-1.syr").stat().st_size,
    }
    assert facts["bytes"] == sum(shard["bytes"] for shard in facts["shards"])
    assert facts["protocols"] == ["BatchReader", "ColumnReader", "Sharded"]
    assert facts["sample"] == {"x": "[0.5, 0.5, 0.5, 0.5, 0.5, 0.5] (2, 3)", "y": "0"}
    assert facts["fingerprint"] == dataload.open(data, fields=["x", "y"]).fingerprint()
    facts = json.loads(ok("inspect", f"syrah:{data}/a-0.syr", "-o", "shapes.x=[3, 2]", "--json"))
    assert facts["fields"]["x"] == {"dtype": "float64", "shape": [3, 2]}
    lines = ok("inspect", "range:10", "-o", "start=3").splitlines()
    assert lines[0] == "range: 7 records in 1 shard, 0 bytes"
    assert lines[-1].split() == ["index", "int64", "()", "3"]


def test_inspect_shows_the_rest_when_there_is_no_good_record_0(tmp_path):
    with dataload.create(tmp_path / "empty.lmdb"):
        pass
    assert ok("inspect", tmp_path / "empty.lmdb").startswith("lmdb: 0 records in 1 shard")
    assert json.loads(ok("inspect", tmp_path / "empty.lmdb", "--json"))["sample"] is None
    with dataload.create(tmp_path / "a.syr") as writer:
        writer.write({"text": "abc"})
    path = tmp_path / "a.syr"
    path.write_bytes(path.read_bytes().replace(b"abc", b"\xff\xfe\xfd"))
    text = ok("inspect", path)
    assert "text   str    ()" in text
    assert "record 0: cannot be read: " in text


def test_inspect_of_an_index_shows_its_shards_and_nested_values():
    lines = ok("inspect", str(Path(__file__).parents[1] / "golden/mds/all")).splitlines()
    assert lines[0] == "mds: 9 records in 3 shards, 6.5 kB"
    assert "json unknown ? {'a': '[0, None]', 'b': \"'x'\"}" in [" ".join(line.split()) for line in lines]
    assert any(line.endswith("985 bytes") and "shard.00002.mds" in line for line in lines)


def test_inspect_of_plain_bytes_and_the_order_of_keys(tmp_path):
    with dataload.create(tmp_path / "a.lmdb") as writer:
        writer.extend([b"one", b"\x00" * 200])
    text = ok("inspect", tmp_path / "a.lmdb")
    assert text.startswith("lmdb: 2 records in 1 shard, ")
    assert "note: records are ordered by key, compared by number" in text
    assert "no fields: records are plain bytes; use --codec to decode them into fields" in text
    assert "record 0: b'one'" in text


def test_inspect_shows_the_manifest(tmp_path, data):
    assert json.loads(ok("inspect", data, "--json"))["manifest"] == []
    (tmp_path / "b").mkdir()
    ok("convert", data / "a-*.syr", tmp_path / "b" / "b.lmdb", "--shards", 2, "--codec", "msgpack")
    text = ok("inspect", tmp_path / "b")
    assert text.startswith("lmdb: 8 records in 2 shards, ")
    assert "\ndataload.json: b-{00000..00001}-of-00002.lmdb, codec='msgpack'\n" in text
    facts = json.loads(ok("inspect", tmp_path / "b", "--json"))
    assert facts["manifest"] == [
        {"pattern": "b-{00000..00001}-of-00002.lmdb", "options": {"codec": "msgpack"}, "hashed": True}
    ]
    assert facts["fields"]["x"] == {"dtype": "float64", "shape": [2, 3]}
    assert ok("verify", tmp_path / "b") == "8 records in 2 files: all can be read\n"


# convert


def test_convert(data):
    text = ok("convert", data / "a-*.syr", data / "b.tar", "--shards", 2)
    assert text.startswith(f"8 records in {data}/b-{{00000..00001}}-of-00002.tar (")
    found = dataload.open(data / "b-*.tar", decode="auto")
    assert found.shard_lengths == (4, 4)
    np.testing.assert_array_equal(found[5]["x"], np.full((2, 3), 5.5))
    text = ok("convert", data / "b-*.tar", data / "c.syr", "--decode", "auto", "--field", "y", "--field", "name")
    assert list(dataload.open(data / "c.syr")) == [{"y": i, "name": f"n{i}"} for i in range(8)]


def test_convert_with_codecs(data):
    text = ok("convert", data / "a-*.syr", data / "b.lmdb", "--codec", "msgpack")
    assert "note" not in text
    assert dataload.open(data / "b.lmdb", codec="msgpack")[2]["name"] == "n2"
    ok("convert", data / "b.lmdb", data / "c.lmdb", "--codec", "msgpack", "--to-codec", "npz")
    assert dataload.open(data / "c.lmdb", codec="npz")[2]["name"] == "n2"
    ok("convert", data / "c.lmdb", f"syrah:{data}/d", "--codec", "npz")
    ok("convert", data / "d", data / "d.syr", "--from", "syrah", "--format", "syrah")
    assert dataload.open(data / "d.syr")[2]["name"] == "n2"
    text = ok("convert", data / "d.syr", data / "e.lmdb")
    assert text.startswith("note: records are encoded with the codec 'tensorprotos'")
    ok("convert", data / "a-0.syr", data / "f.tar", "--to-option", "index=false")
    assert not (data / "f.idx").exists()


def test_convert_again(data):
    arguments = ("convert", data / "a-*.syr", data / "b.syr")
    ok(*arguments)
    fail(2, *arguments)
    assert "8 records from an earlier run" in ok(*arguments, "--resume")
    ok(*arguments, "--overwrite")
    result = fail(2, "convert", data / "a-0.syr", data / "b.syr", "--resume")
    assert "records: 8 when it began, 4 now" in result.stderr
    ok("convert", data / "a-*.syr", data / "p{shard:02d}.syr", "--records-per-shard", 3)
    assert dataload.open(data / "p{00..02}.syr").shard_lengths == (2, 3, 3)


def test_convert_keeps_the_key_if_asked(tmp_path):
    with dataload.create(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "k", "txt": "t"})
    text = ok("convert", tmp_path / "a.tar", tmp_path / "a.syr")
    assert text.startswith("note: the field '__key__' of tar samples is dropped; --keep-key keeps it\n")
    ok("convert", tmp_path / "a.tar", tmp_path / "b.syr", "--keep-key")
    assert dataload.open(tmp_path / "b.syr")[0] == {"__key__": "k", "txt": "t"}


# verify


def test_verify_names_every_bad_record(damaged, data):
    assert ok("verify", data / "a-*.syr") == "8 records in 2 files: all can be read\n"
    report = json.loads(ok("verify", data / "a-*.syr", "--json"))
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
    report = json.loads(fail(1, "verify", damaged, "--json").stdout)
    assert (report["ok"], report["records"], report["files"]) == (False, 10, 1)
    content = damaged.read_bytes()
    for finding, index in zip(report["bad"], (3, 7), strict=True):
        assert (finding["path"], finding["index"], finding["record"]) == (str(damaged), index, index)
        assert finding["offset"] == content.index(b"rec\xff\xff\xff %d" % index) + 3
        assert finding["error"] == "CorruptFileError"
        assert finding["cause"].startswith(f"{damaged}, byte ")


def test_verify_counts_records_over_all_files(damaged):
    with dataload.create(damaged.with_name("a.syr")) as writer:
        writer.extend({"text": "good"} for _ in range(4))
    report = json.loads(fail(1, "verify", damaged.parent, "--json").stdout)
    assert [(f["index"], f["record"], f["path"]) for f in report["bad"]] == [
        (7, 3, str(damaged)),
        (11, 7, str(damaged)),
    ]


def test_verify_goes_on_when_a_whole_file_is_bad(damaged, data):
    (data / "b.syr").write_bytes(b"GS")
    report = json.loads(fail(1, "verify", data, "--json").stdout)
    places = [(os.path.basename(f["path"]), f["index"], f["record"], f["offset"]) for f in report["bad"]]
    # Behind a file that does not open nobody knows the number of a record in the data set.
    assert [place[:3] for place in places] == [
        ("b.syr", None, None),
        ("damaged.syr", None, 3),
        ("damaged.syr", None, 7),
    ]
    assert report["records"] == 18
    only = fail(1, "verify", data / "b.syr")
    assert f"{data}/b.syr, byte 0: " in only.stdout
    assert only.stderr == "error: 1 bad in 0 records read\n"


def refuse_seven(data):
    if data == b"7":
        raise KeyError("seven")
    return {"n": int(data)}


def test_verify_reads_a_part_of_the_files(damaged, data):
    assert ok("verify", data, "--part", "1/2") == "4 records in 1 file: all can be read\n"
    report = json.loads(fail(1, "verify", data, "--part", "2/2", "--json").stdout)
    assert (report["files"], report["records"]) == (2, 14)
    # The records of the first part were not counted.
    assert [(f["index"], f["record"], f["path"]) for f in report["bad"]] == [
        (None, 3, str(damaged)),
        (None, 7, str(damaged)),
    ]
    assert [f["index"] for f in json.loads(fail(1, "verify", damaged, "--part", "1/1", "--json").stdout)["bad"]] == [
        3,
        7,
    ]
    assert "cannot split 3 shards into 4 parts: ask for fewer parts" in fail(2, "verify", data, "--part", "1/4").stderr


def test_verify_reports_what_a_users_codec_raises(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "users_codec", sys.modules[__name__])
    with dataload.create(tmp_path / "a.lmdb") as writer:
        writer.extend(b"%d" % i for i in range(10))
    report = json.loads(fail(1, "verify", tmp_path / "a.lmdb", "--json", "--codec", "users_codec:refuse_seven").stdout)
    assert [(f["index"], f["path"]) for f in report["bad"]] == [(7, str(tmp_path / "a.lmdb/data.mdb"))]
    assert "KeyError: 'seven'" in report["bad"][0]["cause"]


def test_verify_calls_neither_a_missing_package_nor_an_unknown_field_bad_data(data, tmp_path, monkeypatch):
    assert "'z'" in fail(2, "verify", data, "--field", "z").stderr
    with dataload.create(tmp_path / "a.arrow") as writer:
        writer.write({"x": 1})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs pyarrow: pip install" in fail(2, "verify", tmp_path / "a.arrow").stderr


# index


def write_tar(path, count=3):
    with dataload.create(path, index=False) as writer:
        writer.extend({"txt": f"t{i}", "cls": i} for i in range(count))


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


def test_index_writes_manifests(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("t-0", "t-1", "v"):
        with dataload.create(f"{name}.array_record", codec="npz") as writer:
            writer.extend({"x": i} for i in range(3))
    text = ok("index", "--manifest", "t-*.array_record", "--codec", "npz")
    assert text == "./dataload.json: t-{0..1}.array_record: 6 records in 2 shards (262.1 kB)\n"
    assert "v.array_record: 3 records in 1 shard" in ok("index", "--manifest", "v.array_record")
    assert len(ok("index", "--manifest", ".").splitlines()) == 2
    Path("v.array_record").unlink()
    assert len(ok("index", "--manifest", ".").splitlines()) == 1
    assert dataload.open(".")[5] == {"x": 2}, "the manifest no longer lists the other, and has the codec"


def test_index_with_options_of_the_other_kind():
    result = fail(2, "index", "a.tar", "--codec", "npz")
    assert result.stderr == "error: --format, --codec, --decode, --part, --merge and --engine are for --manifest\n"
    result = fail(2, "index", "--manifest", "a.tar", "--directory", "x")
    assert result.stderr == "error: a manifest is written beside its shards: leave --directory out\n"


def test_index_of_samples_that_are_torn_apart(tmp_path):
    import io
    import tarfile

    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("a.txt", "b.txt", "a.cls"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"1"))
    result = fail(1, "index", path)
    assert "byte 2048: sample 'a'" in result.stderr
    assert not (tmp_path / "a.idx").exists()
    assert ok("index", path, "--no-strict") == f"{path}: 3 samples\n"


# Terminals


@pytest.mark.slow
def test_progress_and_colour_on_a_terminal_only(data):
    """On a pseudo-terminal stderr has a bar and colours; stdout, a pipe, has none."""
    import pty

    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "dataload"]
    arguments = ["convert", str(data / "a-*.syr"), str(data / "b.syr")]
    try:
        child = subprocess.run(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=slave, env=environment, check=True, text=True
        )
        assert_plain(child.stdout)
        failed = subprocess.run([*command, *arguments], stderr=slave, env=environment, check=False)
        assert failed.returncode == 2
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
