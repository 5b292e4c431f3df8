"""The engine `local`: the bytes of one run, whatever is killed, and errors and Ctrl-C in words."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path

import part_sources
import pytest
from command_line import fail, ok
from converted import content
from part_sources import COUNT, Eventful, Unloadable

import dataload
from dataload.convert import LocalEngine, convert
from dataload.errors import ConfigError, CorruptFileError, SourceError

SHARDS = 5

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.fixture
def source(tmp_path):
    return Eventful(tmp_path / "log", "die", times=0)


@pytest.fixture
def expected(source, tmp_path):
    """What one run without an engine writes."""
    (tmp_path / "one").mkdir()
    (tmp_path / "parts").mkdir()
    convert(source, tmp_path / "one/b.syr", shards=SHARDS)
    return content(tmp_path / "one")


def run(source, tmp_path, **options):
    return convert(
        source, tmp_path / "parts/b.syr", **{"shards": SHARDS, "engine": LocalEngine(num_workers=2), **options}
    )


def test_the_bytes_of_one_run(source, expected, tmp_path):
    seen = []
    report = run(source, tmp_path, engine="local", progress=lambda *of: seen.append(of))
    assert content(tmp_path / "parts") == expected
    assert (report.records, report.resumed, len(report.paths)) == (COUNT, 0, SHARDS)
    assert report.notes == ()
    assert report.manifest == str(tmp_path / "parts/dataload.json")
    assert seen == sorted(seen)
    assert seen[-1] == (COUNT, COUNT)
    assert run(source, tmp_path, resume=True).resumed == COUNT, "as after one run"
    with pytest.raises(ConfigError, match=r"exists \(and 4 more\): choose another name, or pass overwrite=True"):
        run(source, tmp_path)
    assert run(source, tmp_path, overwrite=True).resumed == 0
    assert content(tmp_path / "parts") == expected


def test_one_shard_is_one_part_and_forks_work(source, tmp_path):
    (tmp_path / "parts").mkdir()
    source.unpicklable = lambda: None
    report = run(source, tmp_path, shards=None, engine=LocalEngine(start_method="fork"))
    assert report.notes == ("one shard is one part: with shards=N, or records_per_shard=N, parts run at the same time",)
    with dataload.open(report.paths[0]) as opened:
        assert len(opened) == COUNT


@pytest.mark.slow_suite
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_of_a_process_that_has_started_a_fork_server(source, expected, tmp_path):
    engine = {"engine": LocalEngine(num_workers=2, parts=2)}
    fork = multiprocessing.get_context("fork").Process(target=run, args=(source, tmp_path), kwargs=engine)
    fork.start()
    fork.join()
    assert (fork.exitcode, content(tmp_path / "parts")) == (0, expected)


def test_a_killed_part_is_tried_again_and_the_others_go_on(expected, tmp_path):
    source = Eventful(tmp_path / "log", "die", times=2)
    report = run(source, tmp_path)
    assert content(tmp_path / "parts") == expected
    assert len(source.events()) == 2
    assert report.records == COUNT


def test_a_part_that_is_always_killed_is_named_and_the_rest_is_kept(expected, source, tmp_path):
    fatal = Eventful(tmp_path / "fatal", "die", times=99)
    message = (
        r"the process of part 3/5 was killed by SIGKILL \(out of memory\?\), in attempt 4 of 4; fewer workers need "
        r"less memory"
    )
    with pytest.raises(SourceError, match=message):
        run(fatal, tmp_path, engine=LocalEngine(num_workers=1))
    assert len(fatal.events()) == 4
    with pytest.raises(ConfigError, match=r"unfinished conversion in 5 parts: .* \(an engine does both with resume"):
        run(source, tmp_path)
    with pytest.raises(ConfigError, match=r"different conversion\n  parts: 5 when it began, 2 now"):
        run(source, tmp_path, resume=True, engine=LocalEngine(parts=2))
    assert run(source, tmp_path, resume=True).resumed == 2 * COUNT // SHARDS
    assert content(tmp_path / "parts") == expected


def test_an_error_names_its_part(expected, tmp_path):
    with pytest.raises(CorruptFileError, match=r"^part 3/5: a\.tar, byte 512, record 3: the checksum is") as caught:
        run(Eventful(tmp_path / "log", "corrupt"), tmp_path)
    assert (caught.value.index, caught.value.offset) == (3, 512)
    with pytest.raises(SourceError, match=r"^part 3/5: Odd: strange") as caught:
        run(Eventful(tmp_path / "odd", "raise_own"), tmp_path, overwrite=True)
    assert "The original traceback, in the process of part 3/5" in caught.value.__notes__[-1]


def test_an_interrupted_run_without_an_engine_is_not_continued_with_one(expected, tmp_path):
    with pytest.raises(CorruptFileError):
        run(Eventful(tmp_path / "log", "corrupt", times=99), tmp_path, engine=None)
    with pytest.raises(ConfigError, match=r"was begun without an engine: continue without one, or pass overwrite=True"):
        run(Eventful(tmp_path / "log", "corrupt", times=0), tmp_path, resume=True)


def test_ctrl_c_deletes_what_is_half_written_and_can_be_resumed(expected, source, tmp_path):
    slow = Eventful(tmp_path / "log", "hang", at=33)

    def interrupt(done, _):
        if done >= 24 and slow.events():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run(slow, tmp_path, progress=interrupt)
    assert caught.value.__notes__ == ["finished shards are kept: pass resume=True to continue"]
    for process in slow.events():
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert not [*(tmp_path / "parts").glob(".*.tmp"), *(tmp_path / "parts").glob("*.lock")]
    assert run(source, tmp_path, resume=True).resumed >= 24
    assert content(tmp_path / "parts") == expected


def environment():
    """Variables with which another process imports what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(part_sources.__file__).parent), *sys.path])}


KILLED = """
    import sys
    from dataload.convert import LocalEngine, convert
    from part_sources import Eventful
    if __name__ == "__main__":
        engine = LocalEngine(num_workers=2)
        convert(Eventful("log", "hang"), "parts/b.syr", shards=5, engine=engine, progress=lambda *_: None)
"""


@pytest.mark.slow_suite
def test_no_part_outlives_the_process_that_started_it(expected, source, tmp_path):
    (tmp_path / "run.py").write_text(textwrap.dedent(KILLED))
    with subprocess.Popen([sys.executable, "run.py"], cwd=tmp_path, env=environment()) as process:
        while not source.events():
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    (child,) = source.events()
    with suppress(ProcessLookupError):
        while True:  # until the timeout of the test
            os.kill(child, 0)
            time.sleep(0.02)
    assert run(source, tmp_path, resume=True).records == COUNT
    assert content(tmp_path / "parts") == expected


@pytest.mark.slow_suite
def test_shards_at_urls(source, expected, object_server, new_fork_server, tmp_path, monkeypatch):
    url = f"s3://{object_server.bucket()}/b.syr"
    settings = {"shards": SHARDS, "remote": {"cache": str(tmp_path / "cache")}}
    with pytest.raises(ConfigError, match=r"storage_options has .*, which may be secret and is not sent to other"):
        convert(source, url, storage_options=object_server.storage_options(), engine="local", **settings)
    for name, value in object_server.environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CorruptFileError, match="part 3/5: "):
        convert(Eventful(tmp_path / "corrupt", "corrupt"), url, engine=LocalEngine(num_workers=1), **settings)
    report = convert(Eventful(tmp_path / "die", "die"), url, resume=True, engine="local", **settings)
    assert report.resumed == 2 * COUNT // SHARDS
    with dataload.open(url.replace("b.syr", "b-{00000..00004}-of-00005.syr")) as opened:
        assert opened.fingerprint() == dataload.open(tmp_path / "one/b-{00000..00004}-of-00005.syr").fingerprint()
        assert [record["n"] for record in opened] == list(range(COUNT))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "rye"}, r"engine='rye': pass 'local' or an engine, such as dataload\.ray\.RayEngine\(\)"),
        ({"part": (1, 2)}, "an engine runs all parts and merges them: pass it without part and merge"),
        ({"merge": True}, "an engine runs all parts and merges them"),
        ({"engine": LocalEngine(parts=6)}, "cannot split 5 shards into 6 parts: ask for fewer parts"),
        ({"writer_options": {"codec": threading.Lock()}}, "engine 'local' sends the source and all options to"),
        ({"writer_options": {"codec": part_sources.Secret()}}, "^not sent"),
    ],
)
def test_wrong_settings(source, tmp_path, options, message):
    (tmp_path / "parts").mkdir()
    with pytest.raises(ConfigError, match=message):
        convert(source, tmp_path / "parts/b.lmdb", **{"shards": SHARDS, "engine": "local", **options})
    assert os.listdir(tmp_path / "parts") == [], "there is nothing to resume"


def test_processes_that_cannot_start(source, expected, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"the process of part \d/5 could not be set up: KeyError: 'lost'"):
        run(Unloadable(tmp_path / "log", "die", times=0), tmp_path)

    def refuse(*_):
        raise BlockingIOError(11, "no more processes")

    with monkeypatch.context() as patched:
        patched.setattr("dataload.executors.handle.WorkerHandle", refuse)
        with pytest.raises(SourceError, match=r"cannot start a process for part 1/5 .*\): raise the limits of open f"):
            run(source, tmp_path)
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    with pytest.raises(ConfigError, match="MainProcess is a daemonic process, which cannot start processes: pass no e"):
        run(source, tmp_path)


def test_a_program_without_a_guard(source, tmp_path):
    (tmp_path / "parts").mkdir()
    program = "from dataload.convert import convert\nfrom dataload import RangeSource\n"
    program += 'convert(RangeSource(9), "parts/b.syr", shards=2, engine="local")\n'
    (tmp_path / "run.py").write_text(program)
    options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "check": False}
    error = subprocess.run([sys.executable, "run.py"], **options).stderr
    assert re.search(r"ConfigError: the process of part \d/2 exited with code 1 before it started; .*__main__", error)
    assert os.listdir(tmp_path / "parts") == []


@pytest.fixture
def data(source, tmp_path):
    (tmp_path / "data").mkdir()
    convert(source, tmp_path / "data/a.syr", shards=3)
    return tmp_path / "data"


def test_convert_by_the_command_line(data, tmp_path):
    for name in ("one", "parts"):
        (tmp_path / name).mkdir()
    arguments = "convert", data, "--shards", SHARDS
    lines = [
        ok(*arguments[:2], tmp_path / name / "b.tar", *arguments[2:], *engine)
        for name, engine in (("one", []), ("parts", ["--engine", "local:workers=2,parts=2"]))
    ]
    assert lines[1] == lines[0].replace("/one/", "/parts/")
    assert content(tmp_path / "parts") == content(tmp_path / "one")
    note = ok("convert", data, tmp_path / "c.tar", "--engine", "local").splitlines()[0]
    assert note == "note: one shard is one part: with --shards N, or --records-per-shard N, parts run at the same time"


def test_an_interrupted_command_says_how_to_continue(data, tmp_path, monkeypatch):
    ok("index", "--manifest", data)
    expected = content(data)

    started = []

    def stop(self, task, count, advance):
        started.append(task(part=(1, count), progress=lambda *_: None))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LocalEngine, "run", stop)
        result = fail(130, "index", "--manifest", data, "--engine", "local")
        other = fail(130, "convert", data, tmp_path / "b.tar", "--engine", "local")
    assert other.stderr == "error: interrupted; finished shards are kept: pass --resume to continue\n"
    assert result.stderr == "error: interrupted; finished shards are kept: run it again to continue\n"
    lines = ok("index", "--manifest", data, "--engine", "local").splitlines()
    assert re.fullmatch(rf"{data}/dataload.json: .*: 40 records in 3 shards \(.*\)", lines[0])
    assert lines[1] == "1 shard from an earlier run"
    assert content(data) == expected


def test_statistics_equal_those_of_one_run(data):
    ok("stats", data)
    expected = content(data)
    (data / "dataload.json").unlink()
    assert "in 3 shards" in ok("stats", data, "--engine", "local:parts=2")
    assert content(data) == expected
    result = fail(2, "stats", data, "--engine", "local", "--part", "1/2")
    assert "an engine runs all parts and merges them" in result.stderr


@pytest.mark.slow_suite
def test_verify_finds_what_one_process_finds(data):
    (data / "dataload.json").unlink()
    assert ok("verify", data, "--engine", "local") == ok("verify", data)
    middle = sorted(data.glob("*.syr"))[1]
    whole = middle.read_bytes()
    half = len(whole) // 2
    for damaged in (whole[:half] + b"\xff" * 3000 + whole[half + 3000 :], b"nothing"):
        middle.write_bytes(damaged)
        one, parts = (fail(1, "verify", data, "--json", *engine).stdout for engine in ([], ["--engine", "local"]))
        assert parts == one
        assert json.loads(parts)["bad"]
