from __future__ import annotations

import gc
import glob
import io
import json
import pickle
import re
import tarfile
import warnings

import numpy as np
import PIL.Image
import pytest

import dataload
import dataload.compat.webdataset as wds
from dataload.compat import _webdataset_stages as stages
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError, WorkerError

SAMPLES = 10


@pytest.fixture(scope="module")
def original():
    """WebDataset itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("webdataset", reason="webdataset is not installed: nothing to compare with")


def sample(i):
    rng = np.random.default_rng(i)
    return {
        "__key__": f"dir/k{i:03d}",
        "jpg": rng.integers(0, 256, (16, 12, 3), np.uint8),
        "Seg.png": rng.integers(0, 256, (5, 6), np.uint8),
        "cls": i,
        "json": {"a": i, "b": [1, None]},
        "txt": f"text {i}",
        "x.npy": rng.standard_normal(3),
        "npz": {"u": np.arange(i)},
        "bin": bytes([i]),
    }


@pytest.fixture(scope="module")
def urls(original, tmp_path_factory):
    """Three archives by WebDataset's own writer, of 4, 4 and 2 samples."""
    place = tmp_path_factory.mktemp("shards")
    with original.ShardWriter(f"{place}/s-%03d.tar", maxcount=4, verbose=0) as writer:
        for i in range(SAMPLES):
            writer.write(sample(i))
    return f"{place}/s-{{000..002}}.tar"


@pytest.fixture
def tar(tmp_path):
    """Writes an archive of files."""

    def write(files, name="x.tar"):
        path = str(tmp_path / name)
        with tarfile.open(path, "w") as archive:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return path

    return write


def plain(value):
    """Something that compares by ``==`` and tells types apart."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    if isinstance(value, (str, bytes, int, float, type(None))):
        return value
    array = np.asarray(value)
    return [type(value).__name__, str(array.dtype), array.shape, array.tobytes()]


def both(original, urls, change):
    """What a pipeline gives there and here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the original leaves archives open
        theirs = [plain(value) for value in change(original.WebDataset(urls, shardshuffle=False))]
        gc.collect()
    with change(wds.WebDataset(urls, shardshuffle=False)) as ours:
        return theirs, [plain(value) for value in ours]


IMAGES = ("rgb", "rgb8", "l", "l8", "torch", "torchrgb", "torchrgb8", "torchl", "torchl8", "pil", "pilrgb", "pill")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data,
        lambda data: data.decode(),
        *(lambda data, spec=spec: data.decode(spec) for spec in IMAGES),
        lambda data: data.decode("rgb8", only="jpg cls").decode("l", partial=True),
        lambda data: data.decode(
            lambda key, data: key if key.endswith(".npy") else None, "rgb8", only=["x.npy", "jpg"]
        ),
        lambda data: data.decode().to_tuple("png;seg.png", "cls", "__key__"),
        lambda data: data.decode().to_tuple("cls txt x.npy").map_tuple(None, str.upper),
        lambda data: data.decode().to_tuple("nothing;cls", "none", missing_is_error=False),
        lambda data: data.decode().map(lambda s: {"double": 2 * s["cls"]}),
        lambda data: data.decode().map_dict(cls=lambda c: c + 1, txt=len),
        lambda data: data.decode().rename(image="jpg;png", label="cls"),
        lambda data: data.decode().rename(keep=False, label="cls"),
        lambda data: data.decode("torchrgb8").to_tuple("jpg", "cls", "txt", "x.npy", "json").batched(4),
        lambda data: data.decode("rgb8").batched(3, partial=False),
        lambda data: data.decode("rgb8").listed(4),
        lambda data: data.decode().to_tuple("cls", "txt").batched(4, collation_fn=None),
        lambda data: data.decode().to_tuple("cls", "txt").batched(4).map_tuple(np.sum).map(list),
        lambda data: data.decode().batched(4).map(lambda b: b["cls"]),
        lambda data: data.decode().slice(3),
        lambda data: data.slice(1, 8, 3).decode(),
        lambda data: data.decode().slice(5).repeat(2),
        lambda data: data.decode().to_tuple("cls").with_epoch(25),
        lambda data: data.decode().to_tuple("cls").slice(6).batched(3).with_epoch(nbatches=5),
        lambda data: data.shuffle(0),
    ],
)
def test_pipelines_give_what_the_original_gives(original, urls, change):
    theirs, ours = both(original, urls, change)
    assert ours == theirs
    assert len(ours) >= 3


def test_the_original_reads_what_we_write(original, tmp_path):
    records = [{"__key__": f"{i:04d}", "cls": i, "txt": f"ä{i}", "x.npy": np.arange(i + 1)} for i in range(5)]
    path = str(tmp_path / "x.tar")
    with dataload.create(path) as writer:
        for record in records:
            writer.write(record)
    theirs, ours = both(original, path, lambda data: data.decode())
    assert ours == theirs
    assert [(s["__key__"], s["cls"], s["txt"]) for s in theirs] == [(r["__key__"], r["cls"], r["txt"]) for r in records]


def keys(data):
    return [found["cls"] for found in data]


def test_a_shuffle_is_the_pool_shuffle(urls):
    def make(**options):
        return wds.WebDataset(urls, **options).decode(only="cls")

    everything = list(range(SAMPLES))
    with make().shuffle(4) as data:
        first, second = keys(data), keys(data)
        assert sorted(first) == sorted(second) == everything
        assert first not in (second, everything)
        assert all(value - place < 4 for place, value in enumerate(first))  # not earlier than the pool allows
    with make().shuffle(4) as again:
        assert keys(again) == first
    with make(seed=1).shuffle(4) as other, make().shuffle(4, seed=5) as another, make().shuffle(4).shuffle(4) as twice:
        assert len({tuple(keys(data)) for data in (other, another, twice)} | {tuple(first)}) == 4
    with make(shardshuffle=2) as shards:
        orders = [keys(shards) for _ in range(6)]
        parts = ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])
        assert len({tuple(order) for order in orders}) > 1
        assert all(part == [v for v in order if v in part] for order in orders for part in parts)
        assert all(order.index(part[-1]) - order.index(part[0]) == len(part) - 1 for order in orders for part in parts)


@pytest.mark.parametrize("batch_size", [4, None])
def test_it_goes_on_from_a_state_with_other_workers(urls, batch_size):
    def make(workers):
        data = wds.WebDataset(urls, shardshuffle=True).shuffle(5).decode("rgb8").to_tuple("jpg", "cls").repeat(3)
        return wds.WebLoader(data, batch_size=batch_size, num_workers=workers)

    with make(0) as data:
        wanted = [np.atleast_1d(labels).tolist() for _, labels in data]
    assert sorted(value for batch in wanted for value in batch) == sorted(list(range(SAMPLES)) * 3)
    with make(2) as data:
        batches = iter(data)
        assert [np.atleast_1d(next(batches)[1]).tolist() for _ in range(3)] == wanted[:3]
        state = json.loads(json.dumps(data.state_dict()))
        batches.close()
    with make(1) as data:
        data.load_state_dict(state)
        assert [np.atleast_1d(labels).tolist() for _, labels in data] == wanted[3:]


def test_ranks_share_the_samples(urls):
    data = wds.WebDataset(urls, nodesplitter=wds.split_by_node, workersplitter=wds.split_by_worker).shuffle(5).decode()
    found = []
    for rank in range(3):
        with wds.WebLoader(data, rank=rank, world_size=3) as part:
            found += keys(part)
    assert sorted(found) == list(range(SAMPLES))
    with wds.WebLoader(data.with_epoch(7), rank=1, world_size=2) as part:
        assert len(list(part)) == len(part) == 7


def test_unbatched_gives_the_samples_as_they_were(urls):
    """The original cuts them out of the batch again, with numpy's numbers in the place of Python's."""
    with wds.WebDataset(urls).decode().to_tuple("cls", "txt").batched(4).unbatched().shuffle(5) as data:
        assert sorted(data) == [(i, f"text {i}") for i in range(SAMPLES)]


def test_lengths(urls):
    data = wds.WebDataset(urls)
    assert (len(data), len(data.batched(4)), len(data.batched(4, partial=False))) == (10, 3, 2)
    assert (len(data.repeat(3)), len(data.with_epoch(7)), len(data.batched(4).with_epoch(7))) == (30, 7, 7)
    assert len(data.with_length(5)) == 5
    with pytest.raises(TypeError, match=r"repeat\(\) is endless and has no length: use repeat\(n\), with_epoch\(n\)"):
        len(data.repeat())
    data.close()


def test_repeat_has_no_end(urls):
    with wds.WebDataset(urls).shuffle(4).decode().repeat() as data:
        found = [value["cls"] for value, _ in zip(data, range(3 * SAMPLES), strict=False)]
    passes = [found[i : i + SAMPLES] for i in range(0, 3 * SAMPLES, SAMPLES)]
    assert [sorted(each) for each in passes] == [list(range(SAMPLES))] * 3
    assert passes[0] != passes[1] != passes[2]


def test_an_archive_without_samples(tar):
    path = tar({})
    with (
        wds.WebDataset(path) as data,
        pytest.raises(ConfigError, match=r"there are no samples in TarSource.*empty_check=False"),
    ):
        list(data)
    with wds.WebDataset(path, empty_check=False) as data:
        assert list(data) == list(data.repeat()) == list(data.with_epoch(3)) == []


def refuse_odd(value):
    if value["cls"] % 2:
        raise ValueError("odd")
    return value


def test_samples_that_fail_are_left_out_if_a_handler_says_so(urls, tmp_path):
    even = list(range(0, SAMPLES, 2))
    with wds.WebDataset(urls).decode().map(refuse_odd, handler=wds.warn_and_continue) as data:
        assert keys(data) == even
    report = tmp_path / "bad.jsonl"
    data = wds.WebDataset(urls, handler=wds.ignore_and_continue).decode().map(refuse_odd).to_tuple("cls").batched(4)
    with wds.WebLoader(data, error_report=report) as loader:
        assert [batch[0].tolist() for batch in loader] == [[0, 2], [4, 6], [8]]
    assert len(report.read_text().splitlines()) == 5
    with wds.WebDataset(urls).decode().map(refuse_odd) as data, pytest.raises(WorkerError, match=r"map.*odd") as caught:
        list(data)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ConfigError, match=r"handler must be reraise_exception, .* got <built-in"):
        wds.WebDataset(urls, handler=print)
    with pytest.raises(ConfigError, match="handler must be"):
        wds.WebDataset(urls).map(len, handler=print)


def test_urls(urls, tmp_path):
    paths = sorted(glob.glob(urls.replace("{000..002}", "*")))
    for same in (paths, "::".join(paths), f"file:{urls}", tuple(paths)):
        with wds.WebDataset(same) as data:
            assert len(data) == SAMPLES
    with wds.WebDataset(str(tmp_path / "none.tar")) as data, pytest.raises(SourceNotFoundError, match=r"none\.tar"):
        list(data)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("pipe:cat x.tar", "pipe: is a stream, but samples are read in random order: copy it"),
        ("-", "urls must be paths of tar archives, .* list the archives"),
        ("shards/", "shards/: urls must be paths of tar archives, not a directory"),
        ({"datasets": []}, "urls is a specification: list the archives"),
    ],
)
def test_urls_that_are_no_local_archives(url, message):
    with pytest.raises(ConfigError, match=message) as caught:
        wds.WebDataset(url)
    assert caught.value.key == "urls"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("select", r"select\(\) does not work with random access: choose samples by position with slice"),
        ("rsample", r"rsample\(\) does not work .*Subset"),
        ("compose", r"compose\(\) .*: there is no stream to attach a stage to; write it as a function"),
    ],
)
def test_methods_that_do_not_map_are_refused_by_name(original, name, message):
    assert hasattr(original.WebDataset, name)
    with pytest.raises(ConfigError, match=message):
        getattr(wds.WebDataset("x.tar"), name)
    with pytest.raises(AttributeError, match="WebDataset has no attribute 'suffle'"):
        wds.WebDataset("x.tar").suffle  # noqa: B018


def test_every_method_of_the_original_is_there_or_refused(original):
    ours = wds.WebDataset("x.tar")
    internal = {
        "create_url_iterator",
        "invoke",
        "iterator",
        "iterator1",
        "run",
        "update_cache_info",
        "register_datapipe_as_function",
    }
    for name in set(dir(original.WebDataset)) - set(dir(object)):
        if name.startswith("_") or name in internal or "datapipe" in name:
            continue
        try:
            assert callable(getattr(ours, name)), name
        except ConfigError as error:
            assert error.key == name  # noqa: PT017 - either is right


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resampled": True}, r"WebDataset\(resampled=...\): pass shardshuffle=True and use repeat\(\) or with_epoch"),
        ({"cache_dir": "x"}, r"WebDataset\(cache_dir=...\): the archives are local files"),
        ({"nodesplitter": print}, r"WebDataset\(nodesplitter=...\): omit it; the loader divides samples among ranks"),
        ({"shuffel": 3}, r"WebDataset\(shuffel=...\): WebDataset has no such argument"),
    ],
)
def test_arguments_that_do_not_map_are_refused_by_name(arguments, message):
    with pytest.raises(ConfigError, match=message):
        wds.WebDataset("x.tar", **arguments)
    wds.WebDataset("x.tar", resampled=False, cache_size=-1, cache_dir=None, verbose=True, detshuffle=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.batched(2).shuffle(10), r"shuffle\(\) follows batched\(\): call it before"),
        (lambda data: data.batched(2).slice(10), r"slice\(\) follows batched\(\): call it before"),
        (lambda data: data.batched(2).decode(), r"decode\(\) follows batched\(\): decode samples first"),
        (lambda data: data.batched(2).batched(2), r"batched\(\) follows batched\(\): batch once"),
        (lambda data: data.unbatched(), r"unbatched\(\) undoes batched\(\) and must follow it directly"),
        (lambda data: data.batched(2).map(len).unlisted(), "must follow it directly"),
        (lambda data: data.batched(0), "batchsize must be an integer >= 1"),
        (lambda data: data.with_epoch(), "nsamples must be an integer >= 1, got -1"),
        (lambda data: data.decode("rbg"), r"decode\('rbg'\): .*rgb"),
        (
            lambda data: data.decode("torchrgba8"),
            r"decode\('torchrgba8'\): .*for transparency, pass handle_extension",
        ),
        (lambda data: data.decode(pre=[len]), r"decode\(pre=, post=\): pass all handlers in order"),
    ],
)
def test_stages_that_do_not_fit(change, message):
    with pytest.raises(ConfigError, match=message):
        change(wds.WebDataset("x.tar"))
    with pytest.raises(TypeError, match=r"WebLoader takes a WebDataset of dataload\.compat\.webdataset, got list"):
        wds.WebLoader([1, 2])


TWO_SHAPES = r"component 0 has the shapes \[\(1,\), \(2,\)\] in one batch: make them equal, or pass collation_fn="


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d.decode(),
            r"ConfigError: component 'pyd': there is no decoder for \.pyd, and nothing is unpickled",
        ),
        (lambda d: d.decode(only="cls"), "CorruptFileError: component 'cls' of sample 'a': expected a number as text"),
        (lambda d: d.decode("rgb", only="png"), "CorruptFileError: component 'png' of sample 'a': an image"),
        (
            lambda d: d.decode(only="txt").decode(only="txt"),
            "TypeError: component 'txt' is str, not bytes: decode once",
        ),
        (lambda d: d.to_tuple("txt").decode(), r"TypeError: decode\(\) takes samples as dicts, got tuple"),
        (lambda d: d.to_tuple("jpg;jpeg"), "ValueError: sample 'a' has none of 'jpg;jpeg'; it has __key__, "),
        (lambda d: d.map(lambda _: None), r"TypeError: the function of map\(\) returned None: WebDataset drops"),
        (lambda d: d.batched(2), r"ConfigError: samples of a batch have different components \(cls, png, pyd\)"),
        (lambda d: d.to_tuple("txt").map(lambda t: (np.zeros(len(t[0])),)).batched(2), f"ConfigError: {TWO_SHAPES}"),
    ],
)
def test_samples_that_do_not_fit(tar, change, message):
    path = tar({"a.txt": b"x", "a.pyd": pickle.dumps(1), "a.cls": b"x", "a.png": b"x", "b.txt": b"xx"})
    with change(wds.WebDataset(path)) as data, pytest.raises(WorkerError) as caught:
        list(data)
    cause = caught.value.__cause__
    assert re.match(message, f"{type(cause).__name__}: {cause}")


def test_own_handlers_for_extensions(original, tar):
    path = tar({"a.seg.pyd": pickle.dumps(3), "a.pyd": b"xyz", "a.TXT": b"x"})

    theirs, ours = (
        (of("seg.pyd", pickle.loads), of("pyd txt", len))
        for of in (original.autodecode.handle_extension, wds.handle_extension)
    )
    (found,), _ = wanted = both(
        original, path, lambda data: data.decode(*(ours if hasattr(data, "loader") else theirs))
    )
    assert wanted[0] == wanted[1]
    assert (found["seg.pyd"], found["pyd"], found["txt"]) == (3, 3, 1)


def test_processes_run_it(urls):
    data = wds.WebDataset(urls).shuffle(5).decode("rgb8").rename(image="jpg").to_tuple("image", "cls")
    with data as one, wds.WebLoader(data, batch_size=4, num_workers=1, executor="processes") as loader:
        assert [label for _, labels in loader for label in labels] == [label for _, label in one]


@pytest.mark.parametrize("suffix", ["jfif", "jpe", "ico", "jp2", "pcx", "tga", "dib", "apng"])
def test_other_images_are_decoded_as_their_names_say(suffix):
    kind = {"jfif": "JPEG", "jpe": "JPEG", "jp2": "JPEG2000", "apng": "PNG"}.get(suffix, suffix)
    stream = io.BytesIO()
    PIL.Image.new("RGB", (16, 16), "red").save(stream, kind)
    image = stages.image_handler("rgb8")(f".{suffix}", stream.getvalue())
    assert image.shape == (16, 16, 3)
    with pytest.raises(
        CorruptFileError, match=r"an image that is named as .* cannot be decoded as such: its content is E"
    ):
        stages.image_handler("rgb8")(f".{suffix}", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")
