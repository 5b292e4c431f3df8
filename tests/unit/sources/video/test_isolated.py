"""Videos that are decoded in child processes: the same frames, and crashes that are errors of a file."""

import gc
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from samples import sampled
from videos import decoded, write_sound, write_video

import dataload
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.sources.video.isolated import Children

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc"),
]


def stat_of(process):
    """The fields of a process after its name; none if it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def children():
    """The processes that decode for this one, among them those that have ended and were not waited for."""
    found = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [each for each in found if stat_of(each)[1:2] == [str(os.getpid())] and "isolated" in command_of(each)]


def command_of(process):
    try:
        return Path(f"/proc/{process}/cmdline").read_text() or "isolated"  # a zombie has none
    except OSError:
        return ""


def busy(process, ticks=5):
    """Wait until a process has worked for some hundredths of a second from now on."""
    begun = int(stat_of(process)[11])
    until = time.monotonic() + 60
    while int(stat_of(process)[11]) < begun + ticks:
        assert time.monotonic() < until
        os.sched_yield()


@pytest.fixture(scope="module")
def long_video(tmp_path_factory):
    """A video that takes a second to decode."""
    return write_video(
        tmp_path_factory.mktemp("video") / "long.mp4", 150, size=(480, 640), gop=150, options={"preset": "ultrafast"}
    )


@pytest.mark.slow_suite
def test_frames_and_sound_are_the_same(tmp_path):
    for name in "ab":
        write_sound(tmp_path / f"{name}.mp4", 2)
    here = dataload.open(tmp_path, fields=["frame", "audio"], cache=False)
    there = dataload.open(tmp_path, fields=["frame", "audio"], cache=False, decode_in="process")
    assert here.fingerprint() == there.fingerprint()
    indices = np.random.default_rng(0).permutation(len(here))[:20]
    assert (here.read_batch(indices, ["frame"])["frame"] == there.read_batch(indices, ["frame"])["frame"]).all()
    assert here.frames_decoded == there.frames_decoded > 0
    lengths = dataload.sequence_lengths(here)
    ours, theirs = (dataload.windows(each, lengths, seconds=0.5, fps=10) for each in (here, there))
    assert (ours[23]["audio"] == theirs[23]["audio"]).all()
    settings = {"batch_size": 6, "shuffle": True, "epochs": 1, "fields": ["frame"]}
    before = there.frames_decoded
    loaders = [dataload.Loader(here, **settings), dataload.Loader(there, num_workers=2, **settings)]
    for left, right in zip(*loaders, strict=True):
        assert (left["frame"] == right["frame"]).all()
    assert there.frames_decoded - before == len(there)
    assert len(children()) >= 1
    there.close()
    assert not children()


@pytest.mark.slow_suite
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_child_that_ends_while_it_decodes(long_video, number):
    source = dataload.open(long_video, decode_in="process")
    source.read([0])
    (child,) = children()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(source.read_batch, [140], ["frame"])
        busy(child)
        os.kill(child, number)
        memory = r" \(out of memory\?\)" if number == signal.SIGKILL else ""
        name = signal.Signals(number).name
        with pytest.raises(CorruptFileError, match=rf"long\.mp4: the process .* at 4\.667 s ended by {name}{memory}$"):
            reading.result()
    assert not children()
    assert (source[149]["frame"] == decoded(long_video)[0][149]).all()
    assert len(children()) == 1
    source.close()
    assert not children()


def test_a_child_that_ends_between_two_reads_is_no_error(tmp_path):
    source = dataload.open(write_video(tmp_path / "a.mp4", 20), decode_in="process")
    assert len(source) == 20
    (child,) = children()
    source.read([3])
    assert children() == [child], "it is used again"
    assert os.getsid(child) == child, "Ctrl-C is for the parent"
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert (source[7]["frame"] == decoded(tmp_path / "a.mp4")[0][7]).all()
    source.close()
    assert not children()


def test_a_child_in_use_when_its_source_closes_ends():
    owner = Children()
    child = owner.take()
    owner.close()
    owner.give_back(child)
    assert not children()


@pytest.mark.slow_suite
def test_a_loader_skips_what_crashes_a_child(long_video, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(long_video, folder / "a.mp4")
    source = dataload.open(folder, decode_in="process", decoder_threads=1)
    len(source)
    with dataload.Loader(source, batch_size=10, epochs=1, on_error="skip", fields=["frame"]) as loader:
        rows = 0
        for number, batch in enumerate(loader):
            if number == 1:
                os.kill(children()[0], signal.SIGKILL)
            rows += len(batch["frame"])
    assert 0 < rows <= 150
    source.close()
    assert not children()


@pytest.mark.parametrize(
    ("code", "reason"),
    sampled([("os.abort()", "SIGABRT"), ("os._exit(3)", "exit code 3")], [("os.abort()", "SIGABRT")]),
)
def test_a_crash_while_a_table_is_made(tmp_path, monkeypatch, code, reason):
    path = write_video(tmp_path / "a.mp4", 20)
    (tmp_path / "fakes" / "av").mkdir(parents=True)
    (tmp_path / "fakes" / "av" / "__init__.py").write_text(f"import os\n{code}\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path / "fakes")  # of the child: this process has imported PyAV
        with pytest.raises(CorruptFileError, match=rf"a\.mp4: the process that read the file ended by {reason}$"):
            len(dataload.open(path, decode_in="process"))
    with dataload.open(path, decode_in="process") as source:
        assert len(source) == 20
    gc.collect()
    assert not children()


@pytest.mark.slow_suite
def test_answers_that_make_no_sense(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", 20)
    (tmp_path / "fakes" / "av").mkdir(parents=True)
    lie = "import gc, os\nfrom multiprocessing.connection import Connection\n"
    lie += "for each in gc.get_objects():\n    if type(each) is Connection:\n        each.send_bytes(%r)\n"
    for answer in (b"\x80\x04.", b'{"value": {"arrays": [["times", 9, [0, 72]]], "extras": {}}}'):
        (tmp_path / "fakes" / "av" / "__init__.py").write_text(lie % answer)
        with monkeypatch.context() as patched:
            patched.syspath_prepend(tmp_path / "fakes")
            with pytest.raises(CorruptFileError, match=r"a\.mp4: the process that read the file (ended|sent)"):
                len(dataload.open(path, decode_in="process", cache=False))


def test_errors_are_those_of_this_process(tmp_path):
    (tmp_path / "empty.mkv").write_bytes(b"")
    with pytest.raises(CorruptFileError, match=r"empty\.mkv: FFmpeg cannot read this video: ") as caught:
        len(dataload.open(tmp_path / "empty.mkv", decode_in="process"))
    assert caught.value.path == str(tmp_path / "empty.mkv")
    path = write_video(tmp_path / "a.avi", 40, codec="mpeg4", b_frames=0, gop=10)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 60] = bytes(60)
    path.write_bytes(data)
    texts = []
    for where in ("thread", "process"):
        with dataload.open(path, decode_in=where) as source, pytest.raises(CorruptFileError) as caught:
            source.read(range(40))
        texts.append((str(caught.value), caught.value.index, caught.value.offset))
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match="decode_in"):
        dataload.open(path, decode_in="fork")
    sound = write_video(tmp_path / "sound.mp4", 0, audio=1.0)
    with pytest.raises((UnsupportedFormatError, CorruptFileError), match=r"has no video|no frame that can be decoded"):
        len(dataload.open(sound, decode_in="process"))


@pytest.mark.slow_suite
def test_an_interrupt_leaves_no_process(long_video):
    source = dataload.open(long_video, decode_in="process")
    source.read([0])
    (child,) = children()

    def interrupt():
        busy(child)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the thread has to start inside
        thread.start()
        source.read_batch([149, 140, 130, 120, 110, 100], ["frame"])
        thread.join()
    thread.join()
    assert not children()
    assert (source[2]["frame"] == decoded(long_video)[0][2]).all()
    del source
    gc.collect()
    assert not children()


@pytest.mark.slow_suite
def test_a_fork_has_children_of_its_own(tmp_path):
    source = dataload.open(write_video(tmp_path / "a.mp4", 20), decode_in="process")
    expected = source[5]["frame"]
    (child,) = children()
    forked = os.fork()
    if not forked:
        same = (source[5]["frame"] == expected).all() and child not in children() and len(children()) == 1
        source.close()
        os._exit(0 if same and not children() else 1)
    assert os.waitpid(forked, 0)[1] == 0
    assert children() == [child]
    assert (source[6]["frame"] == decoded(tmp_path / "a.mp4")[0][6]).all()
    assert children() == [child]
    source.close()


def test_children_end_with_their_parent(tmp_path):
    path = write_video(tmp_path / "a.mp4", 20)
    reading, writing = os.pipe()
    parent = os.fork()
    if not parent:
        source = dataload.open(path, decode_in="process")
        source.read([0])
        os.write(writing, str(children()[0]).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    child = int(os.read(reading, 20))
    os.close(reading)
    os.close(writing)
    until = time.monotonic() + 60
    while stat_of(child)[:1] not in ([], ["Z"]):
        assert time.monotonic() < until
        os.sched_yield()


@pytest.mark.slow_suite
def test_worker_processes_read_what_children_of_their_parent_decode(tmp_path):
    source = dataload.open(write_video(tmp_path / "a.mp4", 60, gop=20), decode_in="process")
    settings = {"batch_size": 6, "num_workers": 2, "executor": "processes", "epochs": 1}
    with dataload.Loader(source, **settings) as loader:
        frames = np.concatenate([batch["frame"] for batch in loader])
    assert (frames == decoded(tmp_path / "a.mp4")[0]).all()
    assert source.frames_decoded == 60
    source.close()
    assert not children()
