import gc
import io
import itertools
import json
import pickle
import re
import shlex
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import wds_pipelines
from made_files import pack
from written import written

import dataload.compat.webdataset as wds
from dataload.errors import ConfigError, MissingDependencyError, StateMismatchError, StoreError, WorkerError
from dataload.sources.tar.reader import TarSource
from dataload.storage import LocalStorage
from dataload.storage.core import can_map

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    original = pytest.importorskip("webdataset", reason="webdataset is not installed")
torch_data = pytest.importorskip("torch.utils.data", reason="torch is not installed")

from dataload.compat import _webdataset_io  # noqa: E402 - needs webdataset

SAMPLES = 17


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Archives of 7, 1, 4, 5 and 2 samples; the last has files that are no components."""
    return wds_pipelines.write_archives(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def tar(tmp_path):
    """Writes an archive of files."""

    return lambda files, name="x.tar": str(pack(tmp_path / name, files))


def make(paths, **options):
    """The usual pipeline: batches of 3 numbers."""
    data = wds.WebDataset(paths[:4], **{"shardshuffle": 4, **options})
    return data.shuffle(5).decode().to_tuple("cls").batched(3)


def numbers(batches):
    return [np.asarray(each[0]).tolist() for each in batches]


def flat(batches):
    return sorted(itertools.chain.from_iterable(batches))


@pytest.mark.slow_suite
def test_random_pipelines_are_equal_to_the_originals(tmp_path):
    kinds = wds_pipelines.compare(range(25), tmp_path)
    assert kinds["state"] > 6
    assert kinds["random"] >= 1


@pytest.mark.slow
def test_batches_and_states_are_the_same_for_any_number_of_workers(paths):
    wanted = numbers(make(paths))
    assert flat(wanted) == list(range(SAMPLES)) != list(itertools.chain(*wanted))
    for workers, other in ((0, 2), (2, 0)):
        loader = wds.WebLoader(make(paths), batch_size=None, num_workers=workers)
        batches = iter(loader)
        head = numbers(itertools.islice(batches, 3))
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["position"], "webdataset" in state) == (9, False), "the position says it all"
        assert head + numbers(batches) == wanted
        loader = wds.WebLoader(make(paths), batch_size=None, num_workers=other)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert head + numbers(loader) == wanted
        second = numbers(loader)
        assert flat(second) == flat(wanted)
        assert second != wanted


@pytest.mark.slow
def test_torchs_own_arguments_and_collation(paths):
    data = wds.WebDataset(paths[:4], shardshuffle=False).decode().to_tuple("cls", "txt")
    theirs = original.WebDataset(paths[:4], shardshuffle=False, nodesplitter=None).decode().to_tuple("cls", "txt")
    options = {"batch_size": 4, "drop_last": True, "timeout": 0, "worker_init_fn": print, "generator": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = [wds_pipelines.plain(batch) for batch in original.WebLoader(theirs, **options)]
        gc.collect()  # it leaves archives open
    loader = wds.WebLoader(data, num_workers=2, persistent_workers=True, prefetch_factor=3, **options)
    assert [wds_pipelines.plain(batch) for batch in loader] == wanted
    assert [wds_pipelines.plain(batch) for batch in loader] == wanted
    assert type(next(iter(wds.WebLoader(data.batched(2), batch_size=None)))[0]).__name__ == "Tensor"
    assert type(next(iter(wds.WebLoader(data, 2, collate_fn=list)))) is list


def test_a_loader_that_batches_by_itself_continues_after_a_batch(paths):
    def loader():
        return wds.WebLoader(wds.WebDataset(paths[:4], shardshuffle=4).decode().to_tuple("cls"), batch_size=3)

    whole, first, again = loader(), loader(), loader()
    head = numbers(itertools.islice(first, 2))
    again.load_state_dict(first.state_dict())
    assert head + numbers(again) == numbers(whole)


def test_ranks_share_the_samples_and_a_state_fits_other_ranks(paths, monkeypatch):
    def on(rank, world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        return make(paths)

    head, states = [], []
    for rank in range(2):
        data = on(rank, 2)
        batches = iter(data)
        head += numbers(itertools.islice(batches, 2))
        states.append(data.state_dict())
    assert states[0] == states[1]
    rest = []
    for rank in range(3):
        data = on(rank, 3)
        data.load_state_dict(states[0])
        rest += numbers(data)
    assert flat(head + rest) == list(range(SAMPLES))
    even = wds.WebDataset(paths[:4], shardshuffle=False).batched(3, collation_fn=None, partial=False)
    assert [len(list(on(rank, 2) and even)) for rank in range(2)] == [2, 2]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(list(wds.WebDataset(paths[:4], shardshuffle=False, nodesplitter=None))) == SAMPLES


def test_epochs_seeds_and_orders(paths):
    data = make(paths)
    first, second = numbers(data), numbers(data)
    assert first != second
    data.set_epoch(0)
    assert numbers(data) == first
    other, own = make(paths, seed=1), make(paths)
    assert numbers(other) != first
    own.set_epoch(1)
    assert numbers(own) == second
    shuffled = wds.WebDataset(paths[:4], shardshuffle=False).decode().compose(wds.detshuffle(6)).to_tuple("cls")
    assert sorted(shuffled) == [(number,) for number in range(SAMPLES)] != list(shuffled)
    unshuffled = wds.WebDataset(paths[:1], shardshuffle=False).decode().compose(wds.detshuffle(0)).to_tuple("cls")
    assert list(unshuffled) == [(number,) for number in range(7)]
    wds.WebDataset(paths[:1], shardshuffle=False).compose(
        wds.detshuffle(1)
    ).loader().close()  # a pool of one is an order
    data = wds.WebDataset(paths[:1], shardshuffle=False).decode().to_tuple("cls")
    one, other = iter(data), iter(data)  # at once
    assert [next(one), next(one), next(other), next(one)] == [(0,), (1,), (0,), (2,)]


def test_states_of_endless_epochs_and_of_those_whose_last_batch_is_dropped(paths):
    data = make(paths).repeat()
    values = iter(data)
    passes = [numbers(itertools.islice(values, 6)) for _ in range(3)]
    assert len(set(map(str, passes))) == 3
    state = data.state_dict()
    assert (state["epoch"], state["position"]) == (3, 0)
    next(values)
    again = make(paths).repeat()
    again.load_state_dict(data.state_dict())
    assert numbers(itertools.islice(values, 9)) == numbers(itertools.islice(again, 9))
    data = wds.WebDataset(paths[:4], shardshuffle=False).batched(3, collation_fn=None, partial=False)
    assert len(list(itertools.islice(iter(data), 5))) == 5
    state = data.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)


WORKERS = r"the state is of 2 workers at different positions .* here are {}: use as many"


@pytest.mark.parametrize("change", [lambda data: data.repeat(2), lambda data: data.with_epoch(7)])
def test_a_worker_of_a_loader_that_saves_its_workers_states(paths, monkeypatch, change):
    """As torchdata's StatefulDataLoader does."""
    monkeypatch.setenv("NUM_WORKERS", "2")
    for worker in "01":
        monkeypatch.setenv("WORKER", worker)
        wanted = numbers(change(make(paths)))
        for at in range(len(wanted)):
            data = change(make(paths))
            head = numbers(itertools.islice(iter(data), at))
            state = data.state_dict()
            data = change(make(paths))
            data.load_state_dict(state)
            assert data.state_dict() == state
            assert head + numbers(data) == wanted
    monkeypatch.setenv("NUM_WORKERS", "3")
    with pytest.raises(ConfigError, match=WORKERS.format(3)):
        change(make(paths)).load_state_dict(state)


def test_skipped_samples_and_epochs_of_a_loader_are_part_of_the_state(paths):
    def loader():
        data = wds.WebDataset(paths[:4], shardshuffle=4).decode()
        data = data.map(wds_pipelines.Fails(3), handler=wds.ignore_and_continue).to_tuple("cls").batched(3)
        return wds.WebLoader(data, batch_size=None).with_epoch(9)

    wanted = numbers(loader())
    assert len(wanted) == 9
    made = loader()
    values = iter(made)
    for at in range(1, 10):
        next(values)
        state = json.loads(json.dumps(made.state_dict()))
        again = loader()
        again.load_state_dict(state)
        assert (numbers(again) == wanted[at:]) == (at < 9)
    assert state["epoch"] > 1


def test_a_loader_of_ours_gives_the_same_batches(paths):
    wanted = numbers(make(paths))
    with make(paths).map(list).loader(num_workers=2) as loader:
        batches = iter(loader)
        head = numbers(itertools.islice(batches, 2))
        data = make(paths).map(list)
        data.load_state_dict(loader.state_dict())
        assert head + numbers(data) == wanted
    with wds.WebDataset(paths[:1], shardshuffle=False).loader() as loader:
        samples = [sample for (sample,) in loader]
    data = wds.WebDataset(paths[:1], shardshuffle=False)
    assert [list(sample.items()) for sample in samples] == [list(sample.items()) for sample in data]
    assert [*samples[0]][:4] == ["__key__", "__url__", "cls", "__local_path__"]
    assert {(sample["__url__"], sample["__local_path__"]) for sample in samples} == {(paths[0], paths[0])}
    with data.select(bool).batched(2, collation_fn=list).map(len).loader() as loader:
        assert list(loader) == [2, 2, 2, 1]
    keys = [sample["__key__"] for sample in data]
    odd = data.select(lambda sample: sample["__key__"] in keys[1::2])
    assert [sample["__key__"] for sample in odd.slice(2)] == keys[1:4:2], "a slice counts what is left"
    with data.rename(label="cls").shuffle(1).slice(2).loader() as loader:
        assert [sample["__key__"] for (sample,) in loader] == keys[:2], "one sample of each"
    tolerant = data.to_tuple("nothing", "cls", handler=wds.ignore_and_continue).slice(2)
    with pytest.raises(ConfigError, match=r"<islice .*> does not work on single samples"):
        tolerant.loader()
    with data.map(lambda _: None).loader() as loader, pytest.raises(WorkerError, match="a stage has left out a sample"):
        list(loader)
    for inexact, stage in ((data.batched(2).unbatched(), "_unbatched"), (data.batched(2).shuffle(3), "_shuffle")):
        with pytest.raises(ConfigError, match=rf"<{stage} .*> does not work on single samples"):
            inexact.loader()


def test_what_has_no_exact_position_says_so(paths, monkeypatch):
    data = wds.WebDataset(paths[:4], shardshuffle=False).to_tuple("cls").batched(2).unbatched()
    state = data.state_dict()
    values = iter(data)
    next(values)
    with pytest.raises(ConfigError, match=r"<_unbatched .*> holds samples back or counts them.*between epochs"):
        data.state_dict()
    assert len(list(values)) == SAMPLES - 1
    assert data.state_dict()["epoch"] == state["epoch"] + 1
    loader = wds.WebLoader(data)
    next(iter(loader))
    with pytest.raises(ConfigError, match="holds samples back"):
        loader.state_dict()
    with pytest.raises(StateMismatchError, match="other data or another order"):
        wds.WebDataset(paths[:4], shardshuffle=2).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="webdataset in the state must have counts and parts, found"):
        data.load_state_dict({**state, "webdataset": {"counts": {}, "parts": [[-1, 0]]}})
    with pytest.raises(ConfigError, match="only a WebLoader of a WebDataset of this module has a state"):
        wds.WebLoader([1, 2]).state_dict()
    changed = wds.WebDataset(paths[:1], shardshuffle=False)
    del changed.pipeline[2:]
    assert list(changed) == [{"url": paths[0]}]
    piped = wds.WebDataset(f"pipe:cat {shlex.quote(paths[0])}", shardshuffle=False, allow_pipe=True)
    monkeypatch.setenv("GOPEN_REWRITE", "nothing=pipe:nothing")
    for stream, why in (
        (wds.WebDataset(paths[:4], shardshuffle=False, select_files=str.isascii), "select_files works on files"),
        (wds.WebDataset(paths[:4], shardshuffle=False, nodesplitter=iter), "nodesplitter chooses them"),
        (wds.WebDataset(paths[:4], shardshuffle=False, workersplitter=iter), "workersplitter chooses them"),
        (wds.WebDataset(paths, resampled=True, shardshuffle=False), "streams, without a state: ResampledShards"),
        (changed, "the stages that read samples were changed"),
        (piped, "pipe:cat .* is a stream"),
        (wds.WebDataset(paths[:1], shardshuffle=False), "GOPEN_REWRITE is set"),
    ):
        assert next(iter(stream))
        for use in (stream.state_dict, stream.loader):
            with pytest.raises(ConfigError, match=why):
                use()


def test_workers_of_torch_know_no_epoch_that_ranks_share(paths, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    info = type("Info", (), {"id": 0, "num_workers": 1, "seed": 7})()
    monkeypatch.setattr(torch_data, "get_worker_info", lambda: info)
    data = make(paths)
    with pytest.warns(UserWarning, match=r"every epoch has the same order, .* or call set_epoch\(n\) before each"):
        list(data)
    data = make(paths)
    data.set_epoch(3)
    list(data)


@pytest.mark.slow_suite
@pytest.mark.slow
def test_workers_that_left_out_samples_have_positions_of_their_own(paths):
    def make(workers):
        data = wds.WebDataset(paths[:4], shardshuffle=4).select(wds_pipelines.Chooses(2)).batched(2, list)
        return wds.WebLoader(data.repeat(2), batch_size=None, num_workers=workers, collate_fn=list)

    loader = make(2)
    batches = iter(loader)
    head = list(itertools.islice(batches, 3))
    state = json.loads(json.dumps(loader.state_dict()))
    wanted = list(batches)
    loader = make(2)
    loader.load_state_dict(state)
    assert list(loader) == wanted
    assert len(head) == 3
    with pytest.raises(ConfigError):
        make(1).load_state_dict(state)


def test_archives_that_only_webdataset_can_read(paths, tar, tmp_path):
    """Cut and missing archives end or are left out as the handler says; names are those of WebDataset."""
    cut = str(tmp_path / "cut.tar")
    with open(paths[0], "rb") as file, open(cut, "wb") as out:
        out.write(file.read()[:9000])
    missing = str(tmp_path / "none.tar")
    twice = tar([("a.txt", b"1"), ("a.TXT", b"2")])
    readme = tar([("README", b""), ("0.jpg", b"1"), ("0.cls", b"2")], "readme.tar")
    meta = tar([("__x__/a.cls", b"1"), ("b.cls", b"2")], "meta.tar")

    def both(urls, handler):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = wds_pipelines.run(original.WebDataset(urls, shardshuffle=False, handler=handler))
            gc.collect()
        with pytest.warns(UserWarning, match="the archives are read as streams, in WebDataset's own order"):
            assert wds_pipelines.run(wds.WebDataset(urls, shardshuffle=False, handler=handler)) == theirs
        return theirs

    assert both([cut, missing, paths[1]], wds.ignore_and_continue)[1] is None
    assert both([missing, paths[1]], wds.ignore_and_stop)[1] == "ValueError"
    assert both([missing, paths[1]], wds.reraise_exception)[1] == "FileNotFoundError"
    assert both([cut], wds.reraise_exception)[1] == "ReadError"
    assert both([twice], wds.reraise_exception)[1] == "ValueError"
    assert both([tar([("c.cls", b"1"), ("a.txt", b"1"), ("a.txt", b"2")])], wds.ignore_and_continue)[1] is None
    assert set(both([readme], wds.reraise_exception)[0][0]) >= {"jpg", "cls"}
    assert len(both([meta], wds.reraise_exception)[0]) == 1


def test_archives_that_are_missing_or_empty_or_have_a_bad_index(paths, tar):
    missing = paths[0].replace("s-00", "s-99")
    data = wds.WebDataset([missing, *paths[:2]], shardshuffle=False, handler=wds.ignore_and_continue)
    assert [sample["__url__"] for sample in data] == [paths[0]] * 7 + [paths[1]]
    assert data.state_dict()["length"] == 8
    empty = tar([])
    with pytest.raises(ValueError, match=r"there are no samples in .*empty_check=False"):
        list(wds.WebDataset(empty, shardshuffle=False))
    assert list(wds.WebDataset(empty, shardshuffle=False, empty_check=False).repeat(3)) == []
    path = tar([("a.cls", b"1"), ("b.cls", b"2")], "bad.tar")
    with open(path.replace(".tar", ".idx"), "w") as file:
        file.write("v1.2 7\nnonsense\n")
    data = wds.WebDataset(path, shardshuffle=False).decode()
    with pytest.warns(UserWarning, match="archives are scanned, because an index beside them is bad"):
        assert [sample["cls"] for sample in data] == [1, 2]
    assert data.state_dict()["epoch"] == 1


def test_a_store_that_does_not_answer_is_no_reason_to_read_streams(paths, monkeypatch):
    monkeypatch.setattr(TarSource, "oddity", lambda self: (_ for _ in ()).throw(StoreError("no answer")))
    with pytest.raises(StoreError):
        list(wds.WebDataset(paths[:1], shardshuffle=False))


def test_what_our_writer_wrote_is_read_as_bytes(tmp_path):
    path = written(tmp_path / "x.tar", [{"__key__": "a", "cls": 7, "txt": "ä"}])
    with wds.WebDataset(path, shardshuffle=False) as data:
        assert next(iter(data))["cls"] == b"7"
        assert next(iter(data.decode()))["txt"] == "ä"
        assert (str(path) in Path("/proc/self/maps").read_text()) == can_map()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_commands_need_consent(paths, tmp_path):
    command = f"pipe:cat {shlex.quote(paths[0])}"
    refused = re.escape(f"{command!r} runs a command in a shell: pass allow_pipe=True")
    for use in (
        lambda: wds.WebDataset(command, shardshuffle=False),
        lambda: wds.WebDataset([paths[0], command], shardshuffle=False, handler=wds.ignore_and_continue),
        lambda: list(wds.DataPipeline(wds.SimpleShardList(command), wds.tarfile_samples)),
        lambda: list(wds.DataPipeline(wds.shardspec(command), wds.tarfile_to_samples(wds.ignore_and_continue))),
        lambda: wds.gopen(command),
        lambda: wds.TarWriter(command),
        lambda: wds.writer.ShardWriter(command),
    ):
        with pytest.raises(ConfigError, match=refused):
            use()
    for other in (
        command.replace("pipe", "PIPE"),
        f" {command}",
        command.replace("pipe", "pi\tpe"),
    ):  # webdataset's, too
        with pytest.raises(ConfigError, match="runs a command in a shell"):
            wds.gopen(other)
    data = wds.WebDataset(command, shardshuffle=False, allow_pipe=True)
    assert len(list(data)) == 7
    stream = wds.DataPipeline(wds.SimpleShardList(command), wds.tarfile_to_samples(allow_pipe=True))
    assert len(list(stream)) == 7
    with wds.TarWriter(f"pipe:cat > {shlex.quote(str(tmp_path))}/x.tar", allow_pipe=True) as writer:
        writer.write({"__key__": "a", "cls": 1})
    assert (tmp_path / "x.tar").exists()
    for target in (io.BytesIO(), tmp_path / "x.tar.gz"):
        is_file = target == tmp_path / "x.tar.gz"
        with wds.TarWriter(str(target) if is_file else target) as writer:
            writer.write({"__key__": "a", "cls": 1})
        stream = target.open("rb") if is_file else io.BytesIO(target.getvalue())
        with stream, tarfile.open(fileobj=stream, mode="r:gz" if is_file else "r:") as archive:
            assert archive.getnames() == ["a.cls"]


def test_pickles_need_consent(tar):
    path = tar([("a.pyd", pickle.dumps(3)), ("a.cls", b"1")])

    def data(**options):
        return wds.WebDataset(path, shardshuffle=False, **options)

    refused = r"components \.pkl, \.pickle, \.pyd, \.pth are pickles, .* pass allow_pickle=True"
    for use in (
        data().decode(),
        data().decode(post=[wds.autodecode.basichandlers]),
        data().compose(wds.decode()),
        data().map(wds.Decoder([])),
    ):
        with pytest.raises(wds.DecodingError) as caught:
            list(use)
        assert re.match(refused, str(caught.value.__cause__))
    for use in (data().xdecode(must_decode=False), data().compose(wds.xdecode(must_decode=False))):
        with pytest.raises(ConfigError, match=refused):
            list(use)
    for use in (
        data(allow_pickle=True).decode(),
        data(allow_pickle=True).xdecode(must_decode=False),
        data().compose(wds.decode(allow_pickle=True)),
        data().decode(wds.handle_extension("pyd", pickle.loads)),
    ):
        assert next(iter(use))["pyd"] == 3


def test_urls_go_through_our_storage(paths, tmp_path, monkeypatch):
    class Elsewhere(LocalStorage):
        def open(self, path, *, whole=False):
            return super().open(path.removeprefix("s3://x"), whole=whole)

        def create(self, path, *, overwrite=False):
            return super().create(path.removeprefix("s3://x"), overwrite=overwrite)

    monkeypatch.setattr(_webdataset_io, "storage_of", lambda url, remote: Elsewhere())
    stream = wds.DataPipeline(wds.SimpleShardList(paths[0]), wds.tarfile_to_samples())
    assert not [sample for sample in stream if "__local_path__" in sample]  # as of WebDataset's own stage
    stream = wds.DataPipeline(wds.SimpleShardList(f"s3://x{paths[0]}"), wds.tarfile_to_samples())
    assert [sample["__url__"] for sample in stream] == [f"s3://x{paths[0]}"] * 7
    for second in ("c", "b"):  # which replaces what is there
        with wds.ShardWriter(f"s3://x{tmp_path}/w-%02d.tar.gz", maxcount=1, verbose=0) as writer:
            writer.write({"__key__": "a", "cls": 1})
            writer.write({"__key__": second, "cls": 2})
    with tarfile.open(tmp_path / "w-01.tar.gz", "r:gz") as archive:
        assert archive.getnames() == ["b.cls"]
    with wds.gopen(f"s3://x{tmp_path}/whole", "wb") as stream:
        stream.write(b"all")
    with pytest.raises(ZeroDivisionError), wds.gopen(f"s3://x{tmp_path}/half", "wb") as stream:
        stream.write(b"some" * (1 // 0))
    assert (tmp_path / "whole").read_bytes() == b"all"
    assert not (tmp_path / "half").exists()
    monkeypatch.setitem(original.gopen_schemes, "s3", lambda url, mode, bufsize: io.BytesIO(b"own"))
    assert wds.gopen("s3://x/y").read() == b"own"


def test_the_names_are_those_of_the_original(monkeypatch):
    for name in vars(original):
        if not name.startswith("_") and name not in ("multi", "gopen"):
            assert getattr(wds, name) is not None, name
    assert wds.compat.WebDataset is wds.WebDataset is not original.WebDataset
    assert wds.shardlists.ResampledShards is wds.ResampledShards is original.ResampledShards
    with pytest.raises(AttributeError, match="has no attribute 'suffle'"):
        wds.suffle  # noqa: B018
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.data", None)
    with pytest.raises(MissingDependencyError, match=r"WebLoader needs torch.*pip install 'dataload\[torch\]'"):
        wds.WebLoader([1])
