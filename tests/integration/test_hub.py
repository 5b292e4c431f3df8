"""Data sets at the Hugging Face Hub, from a server of its API."""

import pickle
import shutil
from collections.abc import Generator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataload
from dataload.errors import ConfigError, SourceNotFoundError, StoreError

pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")
huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("obstore")

from hub_server import Hub, serving  # noqa: E402

OLD, NEW = "1" * 40, "2" * 40


def table(first: int, count: int = 50) -> bytes:
    file = BytesIO()
    pq.write_table(pa.table({"x": np.arange(first, first + count)}), file)
    return file.getvalue()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    old = {"README.md": b"# Data", "data/train-0.parquet": table(0), "data/train-1.parquet": table(50)}
    new = {**old, "data/train-1.parquet": table(1000)}
    revisions = {"main": OLD, "v1": OLD, "refs/convert/parquet": NEW}
    with serving(Hub("org/numbers", {OLD: old, NEW: new}, revisions)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield hub
        huggingface_hub.close_session()


def values(source: Any) -> list[int]:
    return [int(value) for value in source.read_batch(np.arange(len(source)))["x"]]


FIRST, SECOND, CHANGED = list(range(50)), list(range(50, 100)), list(range(1000, 1050))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://datasets/org/numbers/data", FIRST + SECOND),
        ("hf://datasets/org/numbers@v1/data/train-*.parquet", FIRST + SECOND),
        ("hf://datasets/org/numbers/data/train-{0..1}.parquet", FIRST + SECOND),
        ("hf://datasets/org/numbers/data/train-1.parquet", SECOND),
        (f"hf://datasets/org/numbers@{NEW}/data/train-1.parquet", CHANGED),
        ("hf://datasets/org/numbers@refs/convert/parquet/data/train-1.parquet", CHANGED),
        ("hf://datasets/org/numbers@refs%2Fconvert%2Fparquet/data/train-1.parquet", CHANGED),
    ],
)
def test_a_path_a_pattern_and_a_revision_name_what_they_do_at_the_hub(hub: Hub, url: str, expected: list[int]) -> None:
    with dataload.open(url) as source:
        assert values(source) == expected
    assert not hub.requested("/data") or hub.requested("/files/data/train-")


def test_the_token_goes_to_the_endpoint_only(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(SourceNotFoundError, match="set HF_TOKEN"):
        dataload.open("hf://datasets/org/numbers/data")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with dataload.open("hf://datasets/org/numbers/data") as source:
        assert values(source) == FIRST + SECOND
        assert "hf_secret" not in repr(source)
        assert b"hf_secret" not in pickle.dumps(source)
    with dataload.open("hf://datasets/org/numbers/data", storage_options={"token": "hf_secret"}) as source:
        assert values(source) == FIRST + SECOND
        with pytest.raises(ConfigError, match="HF_TOKEN"):
            pickle.dumps(source)
    assert hub.leaked == []


def test_whole_shards_go_to_our_cache(hub: Hub, tmp_path: Path) -> None:
    remote = {"mode": "shards", "cache": str(tmp_path / "ours")}
    downloads = list[int]()
    for _ in range(2):
        with dataload.open("hf://datasets/org/numbers/data", remote=remote) as source:
            loader = dataload.Loader(source, batch_size=10, shuffle=True, seed=1)
            assert sorted(int(x) for batch in loader for x in batch["x"]) == FIRST + SECOND
        downloads.append(hub.requested("/files/data/train"))
    assert downloads[0] > 0 == downloads[1] - downloads[0]
    assert len([*(tmp_path / "ours").rglob("*train-*parquet*")]) == 2


def held(hub: Hub, tmp_path: Path, names: list[str]) -> None:
    """Put files into the cache of huggingface_hub, as it lays them out."""
    root = tmp_path / "hub" / "datasets--org--numbers"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(OLD)
    for name in names:
        path = root / "snapshots" / OLD / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hub.commits[OLD][name])


def test_files_of_the_hubs_own_cache_are_read_from_there(hub: Hub, tmp_path: Path) -> None:
    held(hub, tmp_path, ["data/train-0.parquet"])
    with dataload.open("hf://datasets/org/numbers/data") as source:
        assert values(source) == FIRST + SECOND
    assert hub.requested("/files/data/train-0") == 0 < hub.requested("/files/data/train-1")


def test_offline_reads_what_the_hubs_own_cache_has(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceNotFoundError, match="HF_HUB_OFFLINE is set"):
        dataload.open("hf://datasets/org/numbers/data")
    held(hub, tmp_path, ["data/train-1.parquet"])
    with dataload.open("hf://datasets/org/numbers/data") as source:
        assert values(source) == SECOND
    assert hub.requests == []


@pytest.mark.parametrize(
    ("url", "kind", "text"),
    [
        ("hf://datasets/org/others/data", SourceNotFoundError, "no data set org/others"),
        ("hf://datasets/org/numbers@v9/data", SourceNotFoundError, "no revision v9"),
        ("hf://datasets/org/numbers/data/train-9.parquet", SourceNotFoundError, "train-9"),
        ("hf://datasets/org/numbers/nothing", SourceNotFoundError, "nothing"),
        ("hf://org/numbers/data", ConfigError, "hf://datasets/ORG/NAME"),
        ("hf:/datasets/org/numbers", ConfigError, "pass a str"),
    ],
)
def test_a_wrong_name_is_an_error_that_says_which(hub: Hub, url: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        dataload.open(url, remote={"retries": 0})


def test_a_gated_data_set_says_where_to_agree(hub: Hub) -> None:
    hub.token, hub.gated = "another", True
    with pytest.raises(StoreError, match=f"accept its terms at {hub.endpoint}/datasets/org/numbers"):
        dataload.open("hf://datasets/org/numbers/data")


def test_requests_are_repeated_where_that_may_help(hub: Hub) -> None:
    hub.failures = [500, 408, 429]
    with dataload.open("hf://datasets/org/numbers/data") as source:
        assert values(source) == FIRST + SECOND
    count, hub.failures = len(hub.requests), [418]
    with pytest.raises(StoreError, match=f"cannot look up .*: {hub.endpoint} answers with status 418"):
        dataload.open("hf://datasets/org/numbers@v1/data")
    assert len(hub.requests) == count + 1


def test_the_hub_is_not_written_to(hub: Hub) -> None:
    for settings in ({}, {"overwrite": True}, {"shards": 2}):
        with pytest.raises(StoreError, match="hf upload"):
            dataload.create("hf://datasets/org/numbers/new.parquet", **settings)
    assert all(method in ("GET", "HEAD", "POST") for method, _ in hub.requests)


@pytest.mark.slow_suite
def test_a_lerobot_data_set_is_read_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("av")
    golden = Path(__file__).parents[1] / "golden" / "lerobot" / "h264"
    root = shutil.copytree(golden, tmp_path / "robot")
    hub.commits[OLD] = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    options = {"delta_timestamps": {"observation.images.top": [-0.1, 0.0], "action": [0.0, 0.1]}}
    with dataload.open("hf://datasets/org/numbers", **options) as source, dataload.open(root, **options) as here:
        assert source.fingerprint() == here.fingerprint()
        with dataload.Loader(source, batch_size=16, shuffle=True, num_workers=2, epochs=1) as loader:
            batches = [*loader]
        assert sorted(np.concatenate([batch["index"] for batch in batches]).tolist()) == list(range(len(here)))
        for batch in batches:
            expected = here.read_batch(batch["index"])
            assert all(np.array_equal(values, expected[name]) for name, values in batch.items())
