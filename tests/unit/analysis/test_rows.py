"""Batches of any kind in pages, arrays and certificates: what a collation or a transform may return."""

from dataclasses import replace

import numpy as np
import pytest

import dataload
from dataload import ConfigError, Loader, Ragged, RangeSource
from dataload.analysis.certify import Certificate, certify, check_certificate
from dataload.analysis.page import Page
from dataload.analysis.shown import describe_column, show_batch, show_records
from dataload.samplers import PackedBatchSampler, Sequential
from dataload.streams import StreamSampler

torch = pytest.importorskip("torch")

ROWS = np.arange(8.0).reshape(4, 2)
BATCHES = {
    "a sum": {"x": ROWS, "sum": 28.0, "0d": np.array(4)},
    "ends of rows": {"ends": np.arange(5), "x": ROWS},
    "tensors that numpy lacks": {"x": torch.ones(4, 2).bfloat16(), "y": torch.ones(4, requires_grad=True)},
    "a sparse tensor": (torch.eye(4).to_sparse(), ROWS),
    "nested": {"a": ({"file": [b"x", b"yy", b"", b"z"]}, Ragged(np.arange(5), np.array([0, 1, 1, 3, 5]))), "e": ()},
    "lists of different lengths": {"x": [[1], [2, 3], [], [[4]]]},
    "names of the plan": {"segment_ids": list("abcd"), "stream_id": ROWS, "is_first": np.zeros((4, 0)), "offset": ROWS},
    "no rate": {"sound": np.zeros((4, 1600), np.float32), "sample_rate": np.full(4, np.inf)},
    "keys that are not text": {0: ROWS, ("a", 1): ROWS},
    "some names of the plan": {"stream_id": np.arange(4), "is_first": np.ones(4, bool)},
    "a number": 3,
    "nothing in a row": {"segment_ids": Ragged(np.array([0, 0, 1]), np.array([0, 0, 2, 2, 3]))},
}


def loader_of(batch):
    return Loader(RangeSource(4), batch_size=4, collate=lambda _: batch)


@pytest.mark.parametrize("name", BATCHES)
def test_any_batch_is_shown_and_certified(name):
    loader = loader_of(BATCHES[name])
    shown = show_batch(loader, 0, 0, most=4)
    assert len(shown.rows) == (0 if name == "a number" else 4)
    assert "<h2" in Page("title", [], [shown]).to_html()
    certificate = certify([loader], 0, range(1), release="1")
    assert check_certificate(Certificate.from_json(certificate.to_json()), [loader_of(BATCHES[name])]) is None


def test_records_with_times_may_have_arrays_without_elements():
    source = dataload.MemorySource({"time": np.arange(4.0), "x": ROWS, "nothing": np.empty((4, 0))})
    html = Page("title", [], [show_records(source, range(4), most=4)]).to_html()
    assert html.count("<polyline") == 2


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1.0, np.nan, 3.0, -np.inf], "1 to 3, mean 2, 2 not finite"),
        ([np.nan], "1 not finite"),
        ([True, False], "0 to 1, mean 0.5"),
        ([], ""),
        (np.ma.array([1, 99, 3], mask=[0, 1, 0]), "1 to 3, mean 2, 1 masked"),
    ],
)
def test_the_range_of_a_column_is_of_its_finite_values(values, found):
    assert describe_column(np.asanyarray(values))[2] == found


def test_certificates_see_all_of_a_batch():
    kept = {"x": ROWS, "ends": np.arange(5)}
    certificate = certify([loader_of(kept)], 0, range(1), release="1")
    for other in ({**kept, "ends": np.arange(5) + 1}, {**kept, "x": ROWS + 1}, {"x": ROWS}):
        assert "has other values" in check_certificate(certificate, [loader_of(other)])
    nested = ([[1, 23], 4], [[12, 3], 4]), ([{"a": {"b": 1}, "c": 2}], [{"a": {"b": 1, "c": 2}}])
    for values, others in nested:
        certificate = certify([loader_of(values)], 0, range(1), release="1")
        assert "has other values" in check_certificate(certificate, [loader_of(others)])
        assert check_certificate(Certificate.from_json(certificate.to_json()), [loader_of(values)]) is None
    certificate = certify([loader_of(np.ma.array([1, 2, 3, 4], mask=[0, 1, 0, 0]))], 0, range(1), release="1")
    assert "has other values" in check_certificate(certificate, [loader_of(np.ma.array([1, 2, 3, 4]))])
    ones = torch.ones(4)
    certificate = certify([loader_of(ones)], 0, range(1), release="1")
    assert check_certificate(certificate, [loader_of(ones.numpy())]) is None
    assert "has other values" in check_certificate(certificate, [loader_of(ones.bfloat16())])


@pytest.mark.parametrize("tail", ["pad", "partial"])
def test_a_rank_whose_records_are_excluded_has_no_rows(tail):
    settings = {"exclude": [0, 3, 4], "tail": tail}
    alone = Loader(RangeSource(8), batch_size=2, **settings)
    ranks = [Loader(RangeSource(8), batch_size=1, rank=rank, world_size=2, **settings) for rank in range(2)]
    assert check_certificate(certify([alone], 0, range(4), release="1"), ranks) is None


@pytest.mark.parametrize("kind", ["fields", "one field", "arrays", "tuples", "packed", "streams", "bad records"])
def test_the_filler_of_other_ranks_is_no_difference(kind):
    arrays = {"x": np.arange(22).reshape(11, 2), "data": np.arange(11.0)}
    source = {
        "one field": {"data": arrays["x"]},
        "arrays": [*arrays["x"]],
        "tuples": [*zip(*arrays.values(), strict=True)],
    }.get(kind, arrays)
    settings = {"batch_size": 4, "shuffle": True}
    if kind == "packed":
        order = PackedBatchSampler(sampler=Sequential(11), lengths=[2] * 11, row_length=5, batch_size=2)
        source, settings = {"x": [*arrays["x"]]}, {"sampler": order}
    if kind == "streams":
        order = StreamSampler(sequence_lengths=(4, 3, 4), rows=4, chunk=2, mode="pack", ends="pad", seed=1)
        settings = {"sampler": order}
    if kind == "bad records":
        settings |= {"on_error": "skip", "exclude": [0, 7]}

    def ranks(count):
        size = settings.get("batch_size", 2) // count
        sizes = {"batch_size": size} if "batch_size" in settings else {}
        if kind == "packed":
            sizes = {"sampler": replace(order, batch_size=size)}
        return [Loader(source, **{**settings, **sizes}, rank=rank, world_size=count) for rank in range(count)]

    steps = ranks(1)[0].batch_sampler.steps(1)
    assert steps == ranks(2)[0].batch_sampler.steps(1) > 1
    certificate = certify(ranks(1), 1, range(steps), release="1")
    assert check_certificate(certificate, ranks(2)) is None


@pytest.mark.parametrize("value", [object(), torch.ones(4, device="meta")], ids=["object", "meta"])
def test_what_cannot_be_compared_is_refused(value):
    with pytest.raises(
        ConfigError, match=r"the batches have values of (object|Tensor), which a certificate cannot compare"
    ):
        certify([loader_of({"x": ROWS, "y": value})], 0, range(1), release=dataload.__version__)
