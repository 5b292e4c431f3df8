"""The public surface is a list; changing it is changing this file."""

import importlib
import re
from pathlib import Path

import pytest

import dataload

PUBLIC = {
    "dataload": """
        DROP CenterCrop Collate ConfigError CorruptFileError DataloadError FieldSpec Loader MemorySource Pack Pad
        Ragged RandomResizedCrop RangeSource RemoteOptions SampleContext StateMismatchError WorkerError concat create
        decoding default_collate field from_config mix open record_lengths sequence_lengths windows
    """,
    "dataload.analysis": "Statistics live_view record_timeline",
    "dataload.convert": "ConvertReport Engine LocalEngine convert",
    "dataload.jax": "DeviceLoader DistributedRank distributed_place",
    "dataload.ray": "Fleet RayEngine convert",
    "dataload.samplers": """
        BatchPlan BatchPlanner BatchSampler BucketBatchSampler GlobalShuffle Lanes Mixture OrderReport
        PackedBatchSampler PoolShuffle Repeat Sequential Serving ShardSequential Subset Weighted blend_weights
        order_report pool_size_for servings_of
    """,
    "dataload.sources": """
        ConcatSource FileSource Format Options ShardReader Source TokenSource Writer require_fields storage_of
    """,
    "dataload.streams": "MultiStreamLoader MultiStreamStatistics RowMixture StreamContext StreamSampler reset_state",
    "dataload.telemetry": "METRICS Metric instrument lightning_callback log_to trainer_callback",
    "dataload.text": "Chat FillInTheMiddle Pairs Preference PrefixLM",
    "dataload.torch": """
        DataLoader DeviceLoader DistributedRank JsonState RankStatistics SourceDataset check_ranks distributed_place
        statistics to_pinned to_tensors wait_ranges
    """,
}


pytestmark = pytest.mark.timeout(90)  # a first import of torch takes long on a busy machine

# JAX starts threads, which the other tests of a process would have to live with.
MODULES = [pytest.param(name, marks=pytest.mark.train) if name == "dataload.jax" else name for name in PUBLIC]


@pytest.mark.parametrize("module", MODULES)
def test_the_list(module):
    if module in {"dataload.torch", "dataload.jax", "dataload.ray"}:
        pytest.importorskip(module.partition(".")[2])
    found = importlib.import_module(module)
    by_kind = sorted(found.__all__, key=lambda name: (not name.isupper(), name))
    assert by_kind == list(found.__all__), "constants first, and sorted"
    assert list(found.__all__) == PUBLIC[module].split()
    for name in found.__all__:
        value = getattr(found, name)
        assert value.__doc__ or name == "default_collate", name


COMPAT = [f"dataload.compat.{name}" for name in ("dali", "grain", "syrah", "torchrecord", "webdataset")]
ALSO_DOCUMENTED = ["dataload.testing", "dataload.types", *COMPAT]


@pytest.mark.parametrize("module", [*PUBLIC, *ALSO_DOCUMENTED])
def test_the_reference_has_every_name(module):
    pages = "\n".join(page.read_text() for page in Path(__file__).parents[1].glob("docs/reference/*.md"))
    documented = set(re.findall(r"^(?:::: |`)(dataload[\w.]+)", pages, re.MULTILINE))
    homes = {"dataload.types": [module, "dataload"]}.get(module, [module])
    names = PUBLIC[module].split() if module in PUBLIC else importlib.import_module(module).__all__
    assert [name for name in names if not documented & {f"{home}.{name}" for home in homes}] == []


def test_every_error_is_exported():
    errors = importlib.import_module("dataload.errors")
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, dataload.DataloadError)
    }
    assert len(classes) > 9
    assert classes <= set(errors.__all__)
    page = (Path(__file__).parents[1] / "docs/reference/errors.md").read_text()
    documented = re.findall(r"^::: dataload(?:\.errors)?\.(\w+)$", page, re.MULTILINE)
    assert sorted(documented) == sorted(classes)


MOVED = {
    "dataload.analysis": "Statistics live_view record_timeline",
    "dataload.errors": """
        ChangedFileError ClosedSourceError MachineError MissingDependencyError SourceError SourceNotFoundError
        StoreError UnsupportedFormatError
    """,
    "dataload.sources": "ConcatSource TokenSource",
    "dataload.streams": "MultiStreamLoader StreamContext",
    "dataload.types": "BatchReader Codec ColumnReader RandomAccessSource RecordWriter Sampler Sharded",
}


@pytest.mark.parametrize(("home", "name"), [(home, name) for home, names in MOVED.items() for name in names.split()])
def test_names_of_0_2_have_moved(home, name):
    module = importlib.import_module(home)
    assert name in module.__all__
    with pytest.warns(DeprecationWarning, match=rf"^dataload\.{name} is deprecated: use {home}\.{name}$"):
        assert getattr(dataload, name) is getattr(module, name)


@pytest.mark.parametrize("package", ["torch", pytest.param("jax", marks=pytest.mark.train)])
def test_the_place_of_a_process_is_called_its_rank(package):
    module = pytest.importorskip(f"dataload.{package}")
    name = f"dataload.{package}.Distributed"
    with pytest.warns(DeprecationWarning, match=rf"^{name}Place is deprecated: use {name}Rank$"):
        assert module.DistributedPlace is module.DistributedRank


def test_the_version_is_the_packages():
    from importlib.metadata import version

    assert version("dataload") == dataload.__version__, "the version was raised: pip install -e . again"
