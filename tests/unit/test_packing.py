"""Pack: records laid out in rows, with segment ids and positions."""

import re
from itertools import pairwise

import numpy as np
import pytest

from dataload import ConfigError, Loader, Pack
from dataload.collate import Packing
from dataload.samplers import PackedBatchSampler, Sequential


def packing(rows, starts, lengths, shape):
    return Packing(*(np.array(values, np.int64) for values in (rows, starts, lengths)), shape)


def test_records_stand_in_their_places():
    samples = [{"t": np.array([1, 2, 3])}, {"t": np.array([4])}, {"t": np.array([5, 6])}]
    batch = Pack(pad_value=-1)(samples, packing([0, 0, 2], [0, 3, 0], [3, 1, 2], (3, 5)))
    assert batch["t"].tolist() == [[1, 2, 3, 4, -1], [-1] * 5, [5, 6, -1, -1, -1]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 0], [0] * 5, [1, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0], [0] * 5, [0, 1, 0, 0, 0]]
    assert batch["t"].dtype == np.int64
    assert batch["segment_ids"].dtype == batch["position_ids"].dtype == np.int32


@pytest.mark.parametrize(
    ("samples", "match"),
    [
        (
            [np.arange(2), np.arange(2)],
            r"cannot pack field 'data': int64 \(2,\) in record 1 of the step, expected int64 \(3,\)",
        ),
        ([np.arange(2), np.arange(3.0)], r"float64 \(3,\) in record 1 of the step, expected int64 \(3,\)"),
        ([{"x": np.arange(2), "y": 1}, {"x": np.arange(3), "y": 1}], r"field 'y': int64 \(\) in record 0"),
        (
            [{"position_ids": np.arange(2)}, {"position_ids": np.arange(3)}],
            "packing adds 'position_ids', and the samples",
        ),
        ([{"segment_ids": np.arange(2)}, {"segment_ids": np.arange(3)}], "packing adds 'segment_ids'"),
    ],
)
def test_what_cannot_be_packed_is_named(samples, match):
    with pytest.raises(ConfigError, match=match):
        Pack()(samples, packing([0, 0], [0, 2], [2, 3], (1, 8)))


def test_pad_values_of_packed_rows_by_field():
    samples = [{"tokens": np.arange(3), "labels": np.arange(3, dtype=np.int16)}]
    rows = packing([0], [0], [3], (1, 5))
    batch = Pack({"labels": -100})(samples, rows)
    assert batch["labels"].tolist() == [[-100, 1, 2, -100, -100]]  # no position predicts the first one
    assert batch["tokens"].tolist() == [[0, 1, 2, 0, 0]]
    with pytest.warns(UserWarning, match="padding fills the integer fields labels, tokens with 0"):
        Pack()(samples, rows)
    with pytest.raises(
        ConfigError, match=r"pad_value names 'lables', which is not a padded field: did you mean 'labels'"
    ):
        Pack({"lables": -100})(samples, rows)
    with pytest.raises(ConfigError, match="pad_value of field 'labels' is 40000, but its dtype int16"):
        Pack(40000)([{"labels": np.arange(3, dtype=np.int16)}], rows)


def rows_of(batch, name="t"):
    """The records in each row of a batch, in the order of the rows."""
    ids = [np.arange(1, segments.max() + 1) for segments in batch["segment_ids"]]
    each = zip(batch[name], batch["segment_ids"], ids, strict=True)
    return [[values[segments == number].tolist() for number in numbers] for values, segments, numbers in each]


def test_what_varlen_attention_takes():
    samples = [{"t": np.arange(n)} for n in (3, 1, 2, 4)]
    batch = Pack(-1, varlen=True)(samples, packing([0, 0, 1, 2], [0, 3, 0, 0], [3, 1, 2, 4], (4, 5)))
    # Rows end with padding, which is a sequence, too.
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 5, 7, 10, 14, 15, 20]
    assert (batch["cu_seqlens"].dtype, type(batch["max_seqlen"]), batch["max_seqlen"]) == (np.int32, int, 5)
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 2], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [0] * 5]
    assert batch["seq_idx"].dtype == np.int32
    flat, bounds = batch["position_ids"].ravel(), batch["cu_seqlens"].tolist()
    for begin, end in pairwise(bounds):
        assert flat[begin:end].tolist() in ([*range(end - begin)], [0] * (end - begin))
    with pytest.raises(ConfigError, match="packing adds 'seq_idx', and the samples have a field of that name"):
        Pack(0, varlen=True)([{"seq_idx": np.arange(1)}], packing([0], [0], [1], (1, 4)))


def test_pieces_of_a_record_stand_in_their_places():
    samples = [{"t": np.arange(5)}, {"t": np.arange(5)}, {"t": np.array([7])}]
    pieces = packing([0, 1, 1], [0, 0, 2], [5, 5, 1], (2, 3))._replace(offsets=np.array([0, 3, 0]))
    batch = Pack(-1)(samples, pieces)
    assert batch["t"].tolist() == [[0, 1, 2], [3, 4, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]


@pytest.mark.parametrize(
    ("pack", "lengths", "expected"),
    [
        (Pack(0, row_length=5), [4, 2, 3, 1], [[4, 1], [2, 3]]),
        (Pack(0), [4, 2], [[4, 2]]),
        (Pack(0, row_length=3, overlong="truncate"), [5, 1], [[3], [1]]),
        (Pack(0, row_length=3, overlong="split"), [5, 1, 7], [[3], [2, 1], [3], [3], [1]]),
        (Pack(0, row_length=3, overlong="split"), [0, 3], [[0, 3]]),
    ],
)
def test_a_step_is_packed_by_itself(pack, lengths, expected):
    samples = [
        {"v": np.full((n, 2), i), "t": np.arange(n) + 10 * i, "label": np.full(n, i)} for i, n in enumerate(lengths)
    ]
    batch = pack(samples)
    found = rows_of(batch)
    assert [[len(record) for record in row] for row in found] == expected
    pieces = [piece for row in found for piece in row if piece]
    whole = [value for sample in samples for value in sample["t"].tolist()]
    if pack.overlong != "truncate":
        assert sorted(value for piece in pieces for value in piece) == whole
    for piece in pieces:
        assert piece == [*range(piece[0], piece[0] + len(piece))]
    assert batch["t"].shape == (len(expected), pack.row_length or sum(lengths))
    assert (batch["v"] == batch["label"][..., None]).all()
    assert rows_of(batch, "label") == [[[value // 10 for value in piece] for piece in row] for row in found]


def test_a_record_longer_than_a_row_and_one_without_length_are_refused():
    with pytest.raises(ConfigError, match="row_length must be at least 5, the length of a record, unless overlong is"):
        Pack(row_length=4)([np.arange(5)])
    with pytest.raises(ConfigError, match="cannot pack record 1 of the step: its first field is no sequence"):
        Pack()([{"x": np.arange(2)}, {"x": 3}])
    with pytest.raises(ConfigError, match="row_length must be an integer >= 1"):
        Pack(row_length=0)


SOURCE = [{"t": np.full(1 + i % 4, i)} for i in range(22)]


def test_ranks_pack_their_own_records_and_may_have_none():
    def served(rank):
        packed = Pack(0, row_length=6, varlen=True)
        return list(Loader(SOURCE[:5], batch_size=2, collate=packed, rank=rank, world_size=2))

    ranks = [served(rank) for rank in (0, 1)]
    assert [[len(batch["t"]) for batch in rank] for rank in ranks] == [[1, 1], [1, 0]]
    empty = ranks[1][1]
    assert (empty["t"].shape, empty["cu_seqlens"].tolist(), empty["max_seqlen"]) == ((0, 6), [0], 0)
    with pytest.raises(ConfigError, match="packed within a step have no filler to mark: choose tail='drop'"):
        Loader(SOURCE, batch_size=2, collate=Pack(row_length=6), tail="pad")
    assert [len(Loader(SOURCE[:5], batch_size=2, collate=Pack(), tail=tail)) for tail in ("drop", None)] == [2, 3]
    rows = PackedBatchSampler(sampler=Sequential(5), lengths=[3] * 5, row_length=6, batch_size=2)
    last = list(Loader([{"t": np.arange(3)}] * 5, sampler=rows, collate=Pack(), tail="pad"))[-1]
    assert last["segment_ids"].any(axis=1).tolist() == [True, False], "rows of a sampler can be padded"


@pytest.mark.parametrize(
    ("length", "row_length", "level", "line"),
    [
        (1, 1, "INFO", "packing within a step fills 100.0% of 1 rows of 1"),
        (19, 20, "INFO", "packing within a step fills 95.0% of 1 rows of 20"),
        (
            3,
            4,
            "WARNING",
            "packing within a step fills 75.0% of 1 rows of 4: measure lengths with `dataload stats`, .*",
        ),
    ],
)
def test_the_log_says_how_full_the_first_batch_is(caplog, length, row_length, level, line):
    caplog.set_level("INFO", "dataload")
    list(Loader([{"t": np.arange(length)}] * 2, batch_size=1, collate=Pack(0, row_length=row_length)))
    (found,) = [record for record in caplog.records if "packing" in record.getMessage()]
    assert found.levelname == level
    assert re.fullmatch(line, found.getMessage())


def test_the_first_label_of_each_piece_is_left_out_of_the_loss():
    samples = [{"labels": np.arange(1, 6), "x": np.arange(1, 6)}, {"labels": np.array([9]), "x": np.array([9])}]
    batch = Pack({"labels": -100, "x": -1}, row_length=3, overlong="split")(samples)
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, 5, -100]]
    assert batch["x"].tolist() == [[1, 2, 3], [4, 5, 9]]
    empty = Pack(-100)([{"labels": np.arange(2)}, {"labels": np.empty(0, np.int64)}])
    assert empty["labels"].tolist() == [[-100, 1]]
    floats = Pack(-100.0)([{"labels": np.arange(2.0)}, {"labels": np.empty(0)}])
    assert floats["labels"].tolist() == [[0, 1]]
