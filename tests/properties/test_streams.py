"""Streams against plain lists: sequences in their order, cut into units, dealt to rows, taken step by step."""

import itertools
import json
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataload import Loader, RangeSource
from dataload._util.randomness import derive_key, hash64, permute
from dataload.streams import RowMixture, StreamSampler

MODES = ("split", "pack", "independent", "shuffled")
ENDS = ("next", "pad", "drop")
TAILS = ("drop", "pad", "partial")


class Model:
    """The settings of a `StreamSampler`, and what they mean.

    A place is (sequence, offset); a unit is a list of places that stay together; a cell is (sequence, offset,
    is_first), or None where nothing stands.
    """

    def __init__(self, lengths, rows, chunk=1, mode="split", ends="next", **settings):
        self.lengths, self.rows, self.chunk, self.mode, self.ends = lengths, rows, chunk, mode, ends
        for name, default in {"seed": 0, "random_start": False, "epoch_steps": None, "tail": "pad"}.items():
            setattr(self, name, settings.get(name, default))
        self.per_step = chunk if ends == "next" else 1
        self.total = sum(len(self.units(sequence, 0)) for sequence in range(len(lengths)))

    @property
    def sampler(self):
        names = ("rows", "chunk", "mode", "ends", "seed", "random_start", "epoch_steps", "tail")
        return StreamSampler(sequence_lengths=self.lengths, **{name: getattr(self, name) for name in names})

    def key(self, *address):
        return derive_key(self.seed, *address, words=2)

    def shuffled(self, count, *address):
        return permute(np.arange(count), count, self.key(*address)).tolist()

    def units(self, sequence, late):
        length = self.lengths[sequence]
        places = [(sequence, offset) for offset in range(length)]
        if self.ends == "next":
            return [[place] for place in places]
        if self.ends == "pad":
            return [places[start : start + self.chunk] for start in range(0, length, self.chunk)]
        return [places[late + i * self.chunk :][: self.chunk] for i in range(length // self.chunk)]

    def late(self, sequence, *address):
        """Records that are left out before the first chunk, of those that some are left out of anyway."""
        if not self.random_start or self.ends != "drop":
            return 0
        word = hash64(self.key("stream starts", *address)[0], np.array([sequence]))
        return int(word[0]) % (self.lengths[sequence] % self.chunk + 1)

    def once(self, order, *address):
        """The units of some sequences, one after another."""
        units = [unit for sequence in order for unit in self.units(sequence, self.late(sequence, *address))]
        if self.random_start and self.ends == "next" and units:
            shift = int(self.key("stream starts", *address)[0]) % len(units)
            units = units[shift:] + units[:shift]
        return units

    def in_order(self, *address):
        return self.shuffled(len(self.lengths), "streams", *address)

    def spans(self, epoch):
        """The units of each row, where rows have an end."""
        order = self.in_order(epoch)
        if self.mode == "split":
            units = self.once(order, epoch)
            cuts = [self.total * row // self.rows for row in range(self.rows + 1)]
            return [units[start:stop] for start, stop in itertools.pairwise(cuts)]
        sizes = [len(self.units(sequence, 0)) for sequence in range(len(self.lengths))]
        loads, rows = [0] * self.rows, [[] for _ in range(self.rows)]
        for sequence in sorted(order, key=lambda s: -sizes[s]):
            row = loads.index(min(loads))
            loads[row] += sizes[sequence]
            rows[row].append(sequence)
        return [self.once([s for s in order if s in mine], epoch) for mine in rows]

    def chunks(self):
        full, rest = divmod(self.total, self.per_step)
        return full if self.tail == "drop" and self.epoch_steps is None else full + bool(rest)

    def steps(self, epoch):
        if not self.total:
            return 0
        if self.epoch_steps is not None:
            return self.epoch_steps
        if self.mode == "independent":
            return -(-self.total // (self.rows * self.per_step))
        if self.mode == "shuffled":
            whole, rest = divmod(self.chunks(), self.rows)
            return whole if self.tail == "drop" else whole + bool(rest)
        sizes = [len(span) for span in self.spans(epoch)]
        return min(sizes) // self.per_step if self.tail == "drop" else -(-max(sizes) // self.per_step)

    def epoch(self, epoch):
        """steps x rows x chunk cells."""
        if not self.steps(epoch):
            return []
        if self.mode == "shuffled":
            rows = self.rows_from_anywhere(epoch)
        elif self.mode == "independent":
            rows = [self.endless_row(row, epoch) for row in range(self.rows)]
        else:
            rows = [self.cells([(unit, i == 0) for i, unit in enumerate(span)]) for span in self.spans(epoch)]
        steps = [[row[t : t + self.per_step] for row in rows] for t in self.firsts(epoch)]
        return [[self.filled(taken) for taken in step] for step in steps]

    def firsts(self, epoch):
        return range(0, self.steps(epoch) * self.per_step, self.per_step)

    def endless_row(self, row, epoch):
        before = epoch * self.steps(epoch) * self.per_step
        needed = before + self.steps(epoch) * self.per_step
        units = []
        for number in range(-(-needed // self.total)):
            units += [(unit, i == 0) for i, unit in enumerate(self.once(self.in_order(row, number), row, number))]
        return self.cells(units)[before:needed]

    def rows_from_anywhere(self, epoch):
        """The chunks of all passes that are needed, dealt to rows."""
        needed, before = self.steps(epoch) * self.rows, 0
        passes = [epoch]
        if self.epoch_steps is not None:
            before = epoch * needed
            passes = range(-(-(before + needed) // self.chunks()))
        dealt = []
        for number in passes:
            units = self.once(range(len(self.lengths)), number)
            for place in self.shuffled(self.chunks(), "stream chunks", number):
                chunk = units[place * self.per_step :][: self.per_step]
                cells = self.cells([(unit, i == 0) for i, unit in enumerate(chunk)])
                dealt.append(cells + [[]] * (self.per_step - len(cells)))
        dealt = dealt[before : before + needed]
        return [[unit for chunk in dealt[row :: self.rows] for unit in chunk] for row in range(self.rows)]

    @staticmethod
    def cells(units):
        found, before = [], None
        for unit, begins in units:
            cells = []
            for i, (sequence, offset) in enumerate(unit):
                cells.append((sequence, offset, (begins and i == 0) or before != (sequence, offset - 1)))
                before = sequence, offset
            found.append(cells)
        return found

    def filled(self, units):
        cells = [cell for unit in units for cell in unit]
        return cells + [None] * (self.chunk - len(cells))

    def index(self, cell):
        return sum(self.lengths[: cell[0]]) + cell[1]


def assert_step(model, rows, found):
    """Whether a batch, or a plan, has what some rows of the model have."""
    records = sum(model.lengths)
    indices, is_first, valid = (found[name].reshape(len(rows), model.chunk) for name in ("index", "is_first", "valid"))
    assert found["is_first"].shape == found["valid"].shape == ((len(rows), model.chunk)[: 1 + (model.chunk > 1)])
    assert (is_first.dtype, valid.dtype) == (bool, bool)
    assert (found["stream_id"].dtype, found["offset"].dtype) == (np.int64, np.int64)
    assert valid.tolist() == [[cell is not None for cell in row] for row in rows]
    assert is_first.tolist() == [[cell is not None and cell[2] for cell in row] for row in rows]
    for row, cells in enumerate(rows):
        there = [model.index(cell) for cell in cells if cell is not None]
        assert indices[row][valid[row]].tolist() == there
        # Rows are filled from the end, so that the first place tells whether there is anything.
        assert (found["stream_id"][row], found["offset"][row]) == (cells[0][:2] if cells[0] else (-1, -1))
    assert ((indices >= 0) & (indices < records)).all()


def columns(plan):
    return {"index": plan.indices, "valid": plan.valid, **plan.columns}


LENGTHS = (
    st.lists(st.integers(0, 12), max_size=8)
    | st.lists(st.sampled_from([0, 1, 30]), max_size=6)
    | st.builds(lambda length, count: [length] * count, st.integers(0, 6), st.integers(0, 9))
)


@st.composite
def models(draw, modes=MODES, ends=ENDS, **given_settings):
    mode, end = draw(st.sampled_from(modes)), draw(st.sampled_from(ends))
    starts = end != "pad" and (mode, end) != ("pack", "next")
    return Model(
        draw(LENGTHS),
        rows=draw(st.integers(1, 6)),
        chunk=draw(st.integers(1, 5)),
        mode=mode,
        ends=end,
        seed=draw(st.integers(0, 3) | st.integers()),
        random_start=starts and draw(st.booleans()),
        epoch_steps=draw(st.none() | st.integers(1, 9)) if mode in ("independent", "shuffled") else None,
        **{"tail": draw(st.sampled_from(TAILS)), **given_settings},
    )


@settings(max_examples=2 * settings().max_examples)
@given(model=models(), epoch=st.integers(0, 4), data=st.data())
def test_plans_are_those_of_plain_lists(model, epoch, data):
    expected, whole = model.epoch(epoch), model.sampler
    assert whole.steps(epoch) == len(expected)
    assert whole.items(epoch) == len(expected) * model.rows
    cuts = data.draw(st.lists(st.integers(0, len(expected)), max_size=3).map(sorted))
    world = data.draw(st.sampled_from([n for n in range(1, model.rows + 1) if model.rows % n == 0]))
    for rank in range(world):
        sampler = whole.with_ranks(rank=rank, world_size=world)
        assert sampler.steps(epoch) == len(expected)
        bounds = [0, *cuts, len(expected)]
        blocks = [sampler.plans(range(*bound), epoch=epoch) for bound in itertools.pairwise(bounds)]
        plans = [plan for block in blocks for plan in block]
        assert [plan.step for plan in plans] == list(range(len(expected)))
        for plan, rows in zip(plans, expected, strict=True):
            assert (plan.rows, plan.chunk) == (model.rows // world, model.chunk)
            assert_step(model, rows[rank::world], columns(plan))
    assert whole.items_per_step * whole.chunk == whole.rows_per_step


def served(model, epoch):
    """What comes at each valid place of an epoch."""
    plans = model.sampler.plans(range(model.sampler.steps(epoch)), epoch=epoch)
    return np.concatenate([np.empty(0, np.int64), *(plan.wanted for plan in plans)]).tolist()


@pytest.mark.parametrize("mode", MODES)
def test_random_starts_reach_every_record_of_sequences_that_fill_a_chunk(mode):
    lengths = [5, 9, 3, 4, 7]
    model = Model(lengths, 2, 4, mode, "drop", random_start=True)
    short = {8 + 6, 8 + 7, 8 + 8}  # the sequence of three
    found = set(itertools.chain(*(served(model, epoch) for epoch in range(80))))
    assert found == set(range(sum(lengths))) - short
    assert set(served(model, 0)) < found


def loaders(stack, sampler, records, world, tail, **settings_):
    return [
        stack.enter_context(
            Loader(RangeSource(records), sampler=sampler, rank=rank, world_size=world, tail=tail, **settings_)
        )
        for rank in range(world)
    ]


def take(iterators, count):
    return [[next(iterator) for iterator in iterators] for _ in range(count)]


def check(model, expected, found):
    """Whether the batches of all ranks, step by step, are those of the model."""
    for rows, batches in zip(expected, found, strict=True):
        for rank, batch in enumerate(batches):
            assert_step(model, rows[rank :: len(batches)], batch)


CASES = [
    Model([5, 0, 9, 2, 14, 1, 7], 6, 2, "split", "next", random_start=True, tail="partial"),
    Model([5, 0, 9, 2, 14, 1, 7], 6, 1, "split", "drop", tail="drop"),
    Model([5, 0, 9, 2, 14, 1, 7], 6, 3, "pack", "pad", tail="pad"),
    Model([5, 0, 9, 2, 14, 1, 7], 6, 1, "pack", "next", tail="partial"),
    Model([5, 0, 9, 2, 14, 1, 7], 6, 2, "independent", "next", random_start=True, tail="drop"),
    Model([5, 0, 9, 2, 14, 1, 7], 6, 2, "independent", "drop", random_start=True, epoch_steps=5, tail="pad"),
    Model([5, 0, 9, 2, 14, 1, 7], 6, 2, "shuffled", "next", epoch_steps=4, tail="pad"),
    Model([5, 0, 9, 2, 14, 1, 7], 6, 3, "shuffled", "pad", tail="partial"),
]
IDS = [f"{model.mode}-{model.ends}-{model.chunk}" for model in CASES]


@pytest.mark.parametrize("model", CASES, ids=IDS)
def test_it_goes_on_from_every_step_with_other_ranks_and_workers(model):
    expected = [model.epoch(epoch) for epoch in range(2)]
    for step in range(len(expected[0])):
        world, other, workers = (1, 2, 3)[step % 3], (2, 6, 3, 1)[step % 4], step // 2 % 3
        with ExitStack() as stack:
            made = loaders(stack, model.sampler, sum(model.lengths), world, model.tail)
            check(model, expected[0][:step], take(list(map(iter, made)), step))
            states = {json.dumps(loader.state_dict()) for loader in made}
            assert len(states) == 1
            made = loaders(stack, model.sampler, sum(model.lengths), other, model.tail, num_workers=workers)
            for loader in made:
                loader.load_state_dict(json.loads(*states))
            check(model, expected[0][step:], list(zip(*made, strict=True)))
            assert [len(loader) for loader in made] == [len(expected[1])] * other
            check(model, expected[1], list(zip(*made, strict=True)))


PARTS = (
    Model([5, 0, 9, 2, 14, 1, 7], 4, 2, "split", "next", tail="pad"),
    Model([5, 0, 9, 2, 14, 1, 7], 2, 2, "shuffled", "next", seed=1, tail="pad"),
    Model([3, 8, 27], 2, 2, "independent", "pad", seed=2, tail="pad"),
)


def mixed(parts, epoch):
    """steps of the rows of each part, those behind the first going on over all epochs."""
    first, *others = parts
    found = [first.epoch(epoch)]
    for part in others:
        part.epoch_steps = first.steps(0)
        found.append(part.epoch(epoch))
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tail", TAILS)
def test_a_mixture_has_the_rows_of_its_parts_side_by_side(world, tail):
    for part in PARTS:
        part.tail, part.epoch_steps = tail, None
    mixture = RowMixture(parts=tuple(part.sampler for part in PARTS))
    is_stream = [True] * (4 // world) + [False] * (2 // world) + [True] * (2 // world)
    with ExitStack() as stack:
        made = loaders(stack, mixture, 38, world, tail)
        for epoch in range(3):
            for steps, batches in zip(mixed(PARTS, epoch), zip(*made, strict=True), strict=True):
                for rank, batch in enumerate(batches):
                    assert batch["is_stream"].tolist() == is_stream
                    start = 0
                    for part, rows in zip(PARTS, steps, strict=True):
                        mine = rows[rank::world]
                        stop = start + len(mine)
                        assert_step(part, mine, {name: column[start:stop] for name, column in batch.items()})
                        start = stop


def test_a_mixture_goes_on_from_every_step_with_other_ranks():
    for part in PARTS:
        part.tail, part.epoch_steps = "pad", None
    mixture = RowMixture(parts=tuple(part.sampler for part in PARTS))

    def joined(batches):
        """The rows of all ranks, as one rank has them."""
        size = len(batches)
        sizes = [part.rows // size for part in PARTS]
        merged = {}
        for name in batches[0]:
            pieces = []
            for part, start in zip(PARTS, np.cumsum([0, *sizes]), strict=False):
                mine = [batch[name][start : start + part.rows // size] for batch in batches]
                pieces.append(np.stack(mine, axis=1).reshape(part.rows, *mine[0].shape[1:]))
            merged[name] = np.concatenate(pieces).tolist()
        return merged

    with ExitStack() as stack:
        (alone,) = loaders(stack, mixture, 38, 1, "pad")
        expected = [joined([batch]) for _ in range(2) for batch in alone]
        steps = len(alone)
        for step in range(steps):
            made = loaders(stack, mixture, 38, 1 + step % 2, "pad")
            take(list(map(iter, made)), step)
            state = made[0].state_dict()
            made = loaders(stack, mixture, 38, 2 - step % 2, "pad", num_workers=step % 3)
            for loader in made:
                loader.load_state_dict(state)
            rest = [joined(batches) for _ in range(2) for batches in zip(*made, strict=True)]
            assert rest == expected[step:]


@settings(max_examples=settings().max_examples // 4)
@given(
    first=models(("split", "pack"), tail="pad", ends=("next", "pad")).filter(lambda m: m.total),
    other=models(("shuffled",), tail="pad", ends=("pad",)).filter(lambda m: m.total),
)
def test_no_chunk_of_a_shuffled_part_comes_again_before_all_came(first, other):
    other = Model(other.lengths, other.rows, first.chunk, "shuffled", "pad", seed=other.seed)
    mixture = RowMixture(parts=(first.sampler, other.sampler))
    chunks = []
    for epoch in range(4):
        for plan in mixture.plans(range(mixture.steps(epoch)), epoch=epoch):
            chunks += zip(*(plan.columns[name][first.rows :].tolist() for name in ("stream_id", "offset")), strict=True)
    for start in range(0, len(chunks), other.total):
        came = chunks[start : start + other.total]
        assert len(set(came)) == len(came)
