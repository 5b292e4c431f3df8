"""Batches of good records: one or several steps per read, and the chunks, masks and columns that plans add."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload import Collate, Loader, MemorySource, Ragged, SampleContext, concat, decoding, sequence_lengths
from dataload._util import clock as decoding_module
from dataload.collate import Packing, default_collate
from dataload.convert import convert
from dataload.errors import ConfigError, DataloadError, WorkerError
from dataload.executors.base import WorkerStatus
from dataload.loader import failures as failures_module
from dataload.loader.failures import ErrorPolicy, StepTrace
from dataload.loader.fetch import BatchLoader, finish
from dataload.loader.step import StepRange, StepWork, load_step
from dataload.samplers import BatchPlan, BatchSampler, Sequential
from dataload.streams import StreamSampler
from dataload.testing.compare import difference
from dataload.transforms import compose

LENGTHS = [5, 3, 6]
RECORDS = sum(LENGTHS)


def record(index):
    return {"index": index, "x": np.full((2, 3), index, np.float32), "text": f"r{index}", "raw": bytes([index])}


SOURCE = MemorySource([record(i) for i in range(RECORDS)])


class Plain:
    """Of somebody's own: no columns."""

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return record(index)


def streams(chunk=2, mode="split", ends="pad", rows=3):
    return StreamSampler(sequence_lengths=LENGTHS, rows=rows, chunk=chunk, mode=mode, ends=ends)


def assert_rows(batch, plan):
    """Whether the fields are those of the plan's records, chunk by chunk."""
    shape = (plan.rows,) if plan.chunk == 1 else (plan.rows, plan.chunk)
    indices = plan.indices.reshape(shape)
    assert np.array_equal(batch["index"], indices)
    assert batch["x"].shape == (*shape, 2, 3)
    assert (batch["x"].dtype, batch["valid"].dtype) == (np.float32, bool)
    assert (batch["x"] == indices[..., None, None]).all()
    nested = np.vectorize(lambda index: f"r{index}")(indices).tolist()
    assert batch["text"] == nested
    assert batch["raw"] == [[bytes([i]) for i in row] if plan.chunk > 1 else bytes([row]) for row in indices.tolist()]
    for name, column in {**plan.columns, "valid": plan.valid}.items():
        assert np.array_equal(batch[name], column)
    assert (batch["is_first"].shape, batch["valid"].shape, batch["offset"].shape) == (shape, shape, shape[:1])


@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize(
    ("source", "settings"),
    [
        (SOURCE, {}),  # several steps from one read of columns
        (SOURCE, {"on_error": "skip", "exclude": []}),
        (SOURCE, {"transform": lambda sample: sample}),
        (Plain(), {}),
        (SOURCE, {"collate": {"x": "pad"}}),
        (SOURCE, {"batch_transform": lambda batch: batch}),
    ],
    ids=["columns", "skip", "transform", "plain", "pad", "batch_transform"],
)
def test_every_way_to_read_gives_the_same(chunk, source, settings):
    planner = streams(chunk)
    with Loader(source, sampler=planner, num_workers=1, **settings) as loader:
        batches = list(loader)
    plans = planner.plans(range(planner.steps(0)), epoch=0)
    for batch, plan in zip(batches, plans, strict=True):
        assert_rows(batch, plan)
        lengths = batch.pop("x_length", None)
        assert (lengths is not None) == ("collate" in settings)
        if lengths is not None:
            assert np.array_equal(lengths, np.full(plan.valid.shape, 2))
        assert list(batch) == [*record(0), "stream_id", "offset", "is_first", "valid"]


def fetcher(source=SOURCE, *, transform=None, collate=default_collate, batch_transform=None, excluded=None):
    return BatchLoader(
        source=source,
        fields=None,
        transform=compose(transform),
        collate=collate,
        batch_transform=batch_transform,
        seed=0,
        policy=ErrorPolicy("skip", excluded),
    )


def plan_of(*indices, **settings):
    return BatchPlan(7, np.array(indices, np.int64), **settings)


@given(
    steps=st.lists(st.lists(st.integers(0, RECORDS - 1), min_size=1, max_size=5), min_size=1, max_size=5),
    pads=st.booleans(),
)
def test_steps_read_together_are_those_read_one_by_one(steps, pads):
    plans = [plan_of(*rows, valid=np.arange(len(rows)) < 2 if pads else None) for rows in steps]
    plans += plans[:1]
    fetch = fetcher()
    together = fetch.load_together(plans, StepTrace())
    assert len(together) == len(plans)
    for found, plan in zip(together, plans, strict=True):
        assert difference(found, load_step(fetch, plan, 0, StepTrace()), "batch") is None


def test_steps_read_together_take_one_read_and_do_not_share_rows():
    class Counting(MemorySource):
        seen = ()

        def _read_columns(self, indices, fields):
            self.seen += tuple(indices.tolist())
            return super()._read_columns(indices, fields)

    source = Counting([record(i) for i in range(RECORDS)])
    first, second = fetcher(source).load_together([plan_of(3, 1), plan_of(1, 4)], StepTrace())
    assert source.seen == (3, 1, 1, 4)
    first["x"][:] = -1
    assert second["x"][:, 0, 0].tolist() == [1, 4]


@pytest.mark.parametrize(
    ("make", "reads"),
    [
        (lambda x, torch: ({"a": {"b": (x, [*x])}}, torch.from_numpy(x)), RECORDS),
        # The first two steps are read once in vain.
        (lambda x, _: {"a": Ragged(x, np.arange(len(x) + 1))}, 2 + RECORDS),
        (lambda x, _: {"a": {"x": x, "same": ["for", "each", "batch"]}}, 2 + RECORDS),
    ],
)
def test_nested_columns_and_tensors_of_several_steps_are_read_once(make, reads):
    torch, source, seen = pytest.importorskip("torch"), Plain(), []
    source.read_batch = lambda indices, _: seen.extend(indices) or make(indices, torch)
    batches = [*Loader(source, batch_size=1, epochs=1)]
    assert len(seen) == reads
    for index, batch in enumerate(batches):
        assert difference(batch, make(np.array([index]), torch), "batch") is None


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (14, 20), (16, 32), (17, 18), (30, 64)])
def test_the_plans_of_a_task_may_span_blocks(start, stop):
    """Sixteen steps are planned at once."""
    work = StepWork(fetcher(), BatchSampler(sampler=Sequential(1 << 16), batch_size=1024), reseeds=False)
    plans = work.plans_of(StepRange(0, 0, start, stop))
    assert [(plan.step, plan.indices[0]) for plan in plans] == [(step, 1024 * step) for step in range(start, stop)]


@pytest.mark.parametrize("tail", ["drop", "pad", "partial"])
def test_a_task_from_before_a_change_that_made_the_epoch_shorter_spoils_no_plans(tail):
    work = StepWork(fetcher(), BatchSampler(sampler=Sequential(10), batch_size=2, tail=tail))
    assert work(StepRange(0, 0, 7, 8), WorkerStatus()).loaded[0].error is not None
    assert work.plan_of(StepRange(0, 0, 2, 3), 2).indices.tolist() == [4, 5]


PACKED = plan_of(1, packing=Packing(np.zeros(1, int), np.zeros(1, int), np.ones(1, int), (1, 4)))


@pytest.mark.parametrize(
    ("settings", "plan"),
    [
        ({"transform": dict}, plan_of(1)),
        ({"batch_transform": dict}, plan_of(1)),
        ({"collate": list}, plan_of(1)),
        ({"excluded": np.array([1])}, plan_of(1)),
        ({"source": Plain()}, plan_of(1)),
        ({}, plan_of()),
        ({}, PACKED),
    ],
)
def test_what_each_step_has_to_do_by_itself(settings, plan):
    assert fetcher(**settings).load_together([plan_of(0), plan], StepTrace()) is None


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for module in (failures_module, decoding_module):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)

    def add(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Encoded:
    """A second to read a batch, and two to decode a record."""

    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        self.clock.add(1)
        with decoding():
            self.clock.add(2 * len(indices))
            return [record(index) for index in indices]


class EncodedColumns(Encoded):
    def read_batch(self, indices, fields=None):
        return default_collate(self.__getitems__(indices))


def test_decoding_is_a_stage_of_its_own(clock):
    fetch, trace = fetcher(Encoded(clock), transform=lambda sample: clock.add(3) or sample), StepTrace()
    load_step(fetch, plan_of(1, 2), 0, trace)
    assert trace.spans == [("read", 0, 1), ("decode", 1, 5), ("transform", 5, 11), ("collate", 11, 11)]
    trace = StepTrace()
    load_step(fetcher(EncodedColumns(clock)), plan_of(1, 2, 3), 0, trace)
    assert trace.spans == [("read", 11, 12), ("decode", 12, 18)]
    trace = StepTrace()
    load_step(fetcher(Plain(), transform=dict), plan_of(1), 0, trace)  # it does not report its decoding
    assert [stage for stage, _, _ in trace.spans] == ["read", "transform", "collate"]


WRONG = (
    ("__getitem__", lambda: next(iter(())), "__getitem__ raised StopIteration for index 0"),
    ("__getitems__", list, "__getitems__ returned 0 records for"),
    ("__getitems__", lambda: {"index": 1}, "__getitems__ returned 'dict' instead of a list"),
    ("read_batch", lambda: {"x": np.zeros(RECORDS + 1)}, f"read_batch returned {RECORDS + 1} values of field 'x'"),
    ("read_batch", lambda: None, "read_batch returned None: does it end without `return`"),
)
USES = {
    "loader": lambda source, _: list(Loader(source, batch_size=3, epochs=1)),
    "joined": lambda source, _: list(Loader(concat([source, source]), batch_size=3, epochs=1)),  # reads a record, too
    "sequences": lambda source, _: sequence_lengths(source, field="x"),
    "converted": lambda source, path: convert(source, path / "a.syr"),  # reads no columns
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("method", "returned", "message"), WRONG)
def test_a_source_that_does_not_return_a_value_for_each_index(tmp_path, use, method, returned, message):
    source = type("Wrong", (Plain,), {method: lambda *_: returned()})()
    if (use, method) != ("converted", "read_batch"):
        with pytest.raises(DataloadError, match=f"the source's {message}"):
            USES[use](source, tmp_path)


def test_transforms_of_a_sample_share_its_context_and_others_get_none():
    seen = []

    def first(sample, context):
        seen.append(context)
        return sample

    def last(sample, context):
        seen.append(context)
        return sample

    load_step(fetcher(transform=[dict, first, dict, last]), plan_of(5, 3), 4, StepTrace())
    assert seen == [SampleContext(index, 4, 0) for index in (5, 5, 3, 3)]
    assert seen[0] is seen[1]


def chunked(rows=3, chunk=2, **settings):
    return BatchPlan(0, np.arange(rows * chunk), np.ones((rows, chunk), bool), chunk=chunk, **settings)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"x": Ragged(np.zeros(6), np.arange(7))}, "Ragged for 'x'"),
        ({"x": np.zeros(6), "a": {"b": (np.zeros(6), 3)}}, "int for 'a.b.1'"),
        (np.zeros((5, 2)), r"ndarray of shape \(5, 2\)"),
        ({"time first": np.zeros((7, 6))}, r"ndarray of shape \(7, 6\) for 'time first'"),
        ({"x": np.float32(3)}, "float32 for 'x'"),
        ({"x": ["a"] * 5}, "list for 'x'"),
        ({"x": "abcdef"}, "str for 'x'"),
        ({"x": None}, "NoneType for 'x'"),
    ],
)
def test_what_cannot_be_cut_into_chunks_is_named(batch, found):
    with pytest.raises(
        ConfigError,
        match=rf"chunks of 2 records need arrays, tensors or lists of 6 values from collate, got {found}: use chunk=1, "
        "or a policy other than 'ragged'",
    ):
        finish(batch, chunked())
    kept = finish(batch, BatchPlan(0, np.arange(6), np.ones(6, bool)))
    assert (kept["data"] if not isinstance(batch, dict) else {name: kept[name] for name in batch}) is not None


def test_ragged_rows_of_one_record_are_served_and_chunks_refused():
    source = MemorySource([{"x": np.full(1 + i % 3, i)} for i in range(RECORDS)])
    with pytest.raises(WorkerError, match=r"step 0 of epoch 0 failed: ConfigError: chunks of 2 .* Ragged for 'x'"):
        next(iter(Loader(source, sampler=streams(2), collate={"x": "ragged"})))
    batch = next(iter(Loader(source, sampler=streams(1), collate=Collate({"x": "ragged"}))))
    assert len(batch["x"].offsets) == 4


@pytest.mark.parametrize("name", ["stream_id", "offset", "is_first", "valid"])
@pytest.mark.parametrize("kind", [MemorySource, list])
def test_fields_of_the_same_names_are_refused(name, kind):
    source = kind([{name: i} for i in range(RECORDS)])
    message = f"streams add '{name}' to each batch, and the samples have a field of that name: rename it"
    with (
        Loader(source, sampler=streams(), num_workers=1) as loader,
        pytest.raises(WorkerError, match=f"ConfigError: {message}"),
    ):
        list(loader)
    with Loader(source, sampler=streams(), transform=lambda sample: {"x": sample[name]}) as loader:
        assert "x" in next(iter(loader))


def test_what_is_added_belongs_to_the_batch():
    plan = chunked(columns={"offset": np.arange(3)})
    given = {"x": np.zeros(6)}
    assert finish(given, BatchPlan(0, np.arange(6))) is given, "a plan that adds nothing leaves it alone"
    batch = finish(given, plan)
    batch["offset"][:], batch["valid"][:] = -7, False
    assert plan.columns["offset"].tolist() == [0, 1, 2]
    assert plan.valid.all()
