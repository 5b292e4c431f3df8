"""``dataload order`` as a user runs it."""

import json
import struct
import sys

import numpy as np
import pytest
from command_line import facts, fail, ok
from figures import assert_no_overlap

import dataload
from dataload.analysis.pictures import order_figure, stream_figure
from dataload.samplers import BatchSampler, GlobalShuffle, PoolShuffle, ShardSequential, quality
from dataload.samplers.streams.report import stream_report
from dataload.streams import RowMixture, StreamSampler

pytestmark = pytest.mark.usefixtures("fonts")


def drawn(planner, shards, about="the order", **options):
    """The sample of an order, and its picture."""
    sample = quality.sample_order(planner)
    report = quality.judge_order(sample, shards)
    return sample, order_figure(sample, shards, report, about, **options)


def text_of(*arguments):
    return ok("order", *arguments)


def lines(*arguments):
    return [json.loads(line) for line in text_of(*arguments, "--json").splitlines()]


@pytest.fixture
def config(tmp_path):
    """1,000 records, batches of 16."""
    return write_config(tmp_path / "train.toml", "range:1000")


def write_config(path, data, shuffle="true"):
    path.write_text(f'[source]\npath = "{data}"\n[loader]\nbatch_size = 16\nshuffle = {shuffle}\nseed = 3\n')
    return path


@pytest.fixture
def shards(tmp_path):
    """A config of 40 shards of 20 records."""
    for shard in range(40):
        with dataload.create(tmp_path / f"a-{shard:02d}.syr") as writer:
            writer.extend({"x": np.full(1, i)} for i in range(20))
    return write_config(tmp_path / "shards.toml", "a-*.syr")


def batches(config, *overrides, epoch=0):
    """What a loader gives."""
    with dataload.from_config(config, overrides=overrides) as loader:
        for e in range(epoch + 1):
            found = [batch["index"].tolist() for batch in loader]
            assert loader.epoch == e + 1
    return found


@pytest.mark.parametrize("epoch", [0, 2])
def test_steps_are_those_of_the_loader(config, epoch):
    served = batches(config, epoch=epoch)
    found = lines(config, "--steps", f"0:{len(served)}", "--epoch", epoch)
    assert [line["indices"] for line in found] == served
    assert [line["step"] for line in found] == list(range(63))
    assert {(line["epoch"], line["rank"], line["world_size"]) for line in found} == {(epoch, None, 1)}
    (one,) = lines(config, "--steps", 7, "--epoch", epoch)
    assert one == found[7]


def test_steps_after_a_state_of_batches_of_another_size(config, tmp_path):
    path = tmp_path / "state.json"
    with dataload.from_config(config, overrides=["loader.batch_size=10"]) as loader:
        next(iter(loader))
        path.write_text(json.dumps(loader.state_dict()))
    with dataload.from_config(config) as loader:
        loader.load_state_dict(json.loads(path.read_text()))
        served = [batch["index"].tolist() for batch in loader]
    assert [line["indices"] for line in lines(config, "--state", path, "--steps", "0:62")] == served


def test_a_state_tells_what_each_source_has_given(tmp_path):
    (tmp_path / "mix.toml").write_text(
        """
        source = [{path = "range:90"}, {path = "range:90"}]
        sampler = {kind = "mixture", weights = [1, 1], stop = "never"}
        loader = {batch_size = 10}
        """
    )
    log = str(tmp_path / "blend.jsonl")
    with dataload.from_config(tmp_path / "mix.toml", overrides=[f"loader.changes={log}"]) as loader:
        batches = iter(loader)
        loader.change_weights([1, 1])
        first = next(batches)["index"].tolist()
        loader.change_weights([0, 1])
        next(batches)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
        expected = next(batches)["index"].tolist()
    arguments = (str(tmp_path / "mix.toml"), "--state", str(tmp_path / "state.json"))
    found = facts("order", *arguments)
    assert (found["epoch"], found["step"]) == (0, 2)
    assert found["sources"] == {
        "0": {"share": 0.0, "records": 5, "epochs": 5 / 90, "tokens": None},
        "1": {"share": 1.0, "records": 15, "epochs": 15 / 90, "tokens": None},
    }
    assert text_of(*arguments).split("tokens")[-1].split() == ["0", "0", "5", "0.06", "-", "1", "1", "15", "0.17", "-"]
    (line,) = lines(*arguments, "--steps", "2", "--json")
    assert [index % 90 for index in line["indices"]] == expected
    assert "not in the state: load one of that time, or the log" in fail(2, "order", *arguments, "--steps", 0).output
    for options in (arguments, arguments[:1]):  # the steps before the change, too
        known = lines(*options, "--changes", log, "--steps", "0:3")
        assert [[index % 90 for index in line["indices"]] for line in known][::2] == [first, expected]
    chosen = ("--index", known[2]["indices"][0], "--epochs", 0, "--steps", "0:3")
    assert [each["step"] for each in facts("trace", *arguments, "--changes", log, *chosen)["servings"]] == [2]
    assert str(first[0]) in ok("show", *arguments, "--changes", log, "--step", 0)


def test_steps_of_a_rank_and_of_all_ranks_together(config):
    one = batches(config, "loader.batch_size=64")
    together = lines(config, "--world-size", 4, "--steps", "0:16")
    assert [line["indices"] for line in together] == one
    assert "valid" not in together[-1], "fillers are a rank's, not the batch's"
    for rank in range(4):
        found = lines(config, "--world-size", 4, "--rank", rank, "--steps", "0:16")
        assert {(line["rank"], line["world_size"]) for line in found} == {(rank, 4)}
        for line, batch in zip(found, one, strict=True):
            rows = [i for i, valid in zip(line["indices"], line["valid"], strict=True) if valid]
            assert rows == batch[rank::4]
            assert len(line["indices"]) == 16
    heading, line = text_of(config, "--steps", "15", "--world-size", 4, "--rank", 2).splitlines()
    assert heading == "epoch 0, steps 15:16 of 16, rank 2 of 4"
    assert line == f"15: {' '.join(map(str, one[15][2::4]))} {' '.join([f'({one[15][-1]})'] * 6)}"


def test_the_report_notes_samples_and_records_that_do_not_come(config):
    text = text_of(config, "--set", f"source.path=range:{10**10 + 3}", "--set", "loader.tail=drop")
    assert "because the epoch has more than 1,048,576" in text
    (last,) = lines(config, "--set", f"source.path=range:{10**10}", "--steps", 10**10 // 16 - 1)
    assert len(last["indices"]) == 16
    text = text_of(config, "--set", "source.path=range:1003", "--set", "loader.tail=drop")
    for step, batch in enumerate(batches(config, "source.path=range:1003")[:3]):
        assert f"\nstep {step}: {' '.join(map(str, batch[:10]))} ...\n" in text
    assert "note: the ideal is a uniform shuffle that serves each record once" in text


def test_the_report_as_json_is_that_of_the_library(config):
    found = facts("order", config, "--epoch", 1, "--world-size", 2)
    report = quality.order_report(BatchSampler(sampler=GlobalShuffle(1000, 3), batch_size=32), epoch=1)
    assert found["report"] == json.loads(json.dumps(report.to_json()))
    assert found["first_indices"] == [batch[:10] for batch in batches(config, "loader.batch_size=32", epoch=1)[:3]]
    assert (found["world_size"], found["rows_per_step"], found["steps"], found["pool"]) == (2, 32, 32, None)


def test_the_filler_of_length_buckets(config, tmp_path):
    np.save(tmp_path / "lengths.npy", 1 + np.arange(1000) % 50)
    buckets = ["sampler.kind=length_buckets", f"sampler.lengths={tmp_path}/lengths.npy", "loader.shuffle=null"]
    buckets = [word for setting in buckets for word in ("--set", setting)]
    tokens = [*buckets, "--set", "sampler.max_tokens=400", "--set", "loader.batch_size=null"]
    head, counts, *_ = text_of(config, *tokens).splitlines()
    assert head.startswith("BucketBatchSampler(world_size=1")
    assert len(head) < 250
    assert " steps of about " in counts
    found = lines(config, *tokens, "--steps", "0:20")
    assert all(len(line["indices"]) * max(1 + i % 50 for i in line["indices"]) <= 400 for line in found)

    batch = [*buckets, "--set", "sampler.boundaries=[20, 40, 60]", "--set", "loader.batch_size=7"]
    plans = lines(config, *batch, "--steps", f"0:{facts('order', config, *batch)['steps']}")
    lengths = [[1 + i % 50 for i in line["indices"]] for line in plans]
    widths = [max(each) for each in lengths], [20 * -(-max(each) // 20) for each in lengths]
    shares = [1 - sum(map(sum, lengths)) / sum(map(int.__mul__, width, map(len, lengths))) for width in widths]
    for ranks in (1, 2):  # each batch is padded by itself
        filler = facts("order", config, *batch, "--world-size", ranks)["filler"]
        assert [filler["longest"], filler["boundary"]] == pytest.approx(shares, abs=1e-6)
    text = f"filler: {shares[0]:.1%} if batches are padded to their longest record, {shares[1]:.1%} if to the boundary"
    assert text in text_of(config, *batch)
    assert facts("order", config)["filler"] is None


def test_quality_tells_the_pool_and_what_the_present_order_reaches(shards):
    text = text_of(shards, "--quality", 0.5, "--set", "loader.shuffle=shards")
    found = facts("order", shards, "--quality", 0.5, "--set", "loader.shuffle=shards")
    pool = found["pool"]
    sampler = PoolShuffle(ShardSequential((20,) * 40, 3), 1024, 3)
    report = quality.order_report(BatchSampler(sampler=sampler, batch_size=16), shard_lengths=(20,) * 40)
    assert pool["present_quality"] == report.mixing.middle
    assert (pool["quality"], pool["present_pool_size"]) == (0.5, 1024)
    size = pool["pool_size"]
    assert 20 < size < 400
    assert f"pool: {size:,} records, over shards in a random order, mix to 0.5 of the ideal in the middle" in text
    assert f"holds {size / 800:.1%} of the data\n" in text
    assert f"pool: the current order, with a pool of 1,024, mixes to {report.mixing.middle:.3f} of the ideal" in text
    text = text_of(write_config(shards, "range:1"), "--quality", 0.9)
    assert "pool: no pool smaller than the data mixes to 0.9 of the ideal" in text
    assert "pool: the current order mixes to an unknown fraction of the ideal there\n" in text


@pytest.mark.slow_suite
def test_the_picture_is_a_png(config, tmp_path):
    path = tmp_path / "order.png"
    assert text_of(config, "--picture", path).endswith(f"\nwrote {path}\n")
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert (width, height > 500) == (1680, True)
    assert path.stat().st_size > 20_000
    assert facts("order", config, "--picture", path)["picture"] == str(path)


def test_the_picture_carries_the_data():
    lengths = (*(100,) * 19, 99)  # 1,999 is prime: no distance is at the edge of a bar
    order = PoolShuffle(ShardSequential(lengths, 0), 300, 0)
    shards = quality.ShardLayout.of(1999, lengths)
    sample, figure = drawn(BatchSampler(sampler=order, batch_size=32), shards, "a $pool$")
    title, about = figure.texts
    assert title.get_text().startswith("A batch mixes ")
    assert about.get_text() == "a $pool$"
    places, moves, mixing = figure.axes
    assert all(axes.get_title("left") and axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
    assert [text.get_text() for text in moves.get_legend().get_texts()] == ["this order", "a uniform shuffle"]

    (dots,) = places.lines
    assert dots.get_xdata().tolist() == list(range(1999))
    assert dots.get_ydata().tolist() == sample.indices.tolist()
    assert places.get_xlim()[0] < 0, "no dot is clipped at an edge"
    assert places.get_ylim()[1] > 1999

    distances = np.abs(sample.indices - np.arange(1999)) / 1999
    heights = [bar.get_height() for bar in moves.patches]
    counts = np.histogram(distances, 50, (0, 1))[0]
    assert heights == pytest.approx((counts / 1999 * 50).tolist())
    (ideal,) = moves.lines
    assert np.column_stack(ideal.get_data()).tolist() == [[0, 2], [1, 0]]

    found, line = mixing.lines
    assert found.get_ydata().tolist() == quality.shards_per_batch(sample, shards).tolist()
    assert found.get_xdata().tolist() == list(range(63))
    assert line.get_ydata()[:-1].tolist() == quality.expected_shards(shards, np.full(62, 32)).tolist()
    assert mixing.get_ylabel() == "shards in a batch of all ranks, of 20"
    assert_no_overlap(figure)


@pytest.mark.slow_suite
def test_the_picture_of_a_long_epoch_says_that_it_is_a_sample():
    _, figure = drawn(
        BatchSampler(sampler=GlobalShuffle(10**10, 0), batch_size=256), quality.ShardLayout.of(10**10), "long"
    )
    assert figure.texts[1].get_text() == "long (a sample: 261,120 positions of 10,000,000,000)"
    (dots,) = figure.axes[0].lines
    assert len(dots.get_xdata()) <= 5000
    assert set(dots.get_xdata() * 20 // 10**10) == set(range(20))
    assert_no_overlap(figure)
    assert "10G" in [text.get_text() for text in figure.axes[0].get_xticklabels()]


@pytest.mark.slow_suite
def test_drawing_leaves_pyplot_alone_and_needs_matplotlib(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    text_of(config, "--picture", tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = fail(2, "order", config, "--picture", tmp_path / "a.png")
    assert result.stderr == "error: a picture needs matplotlib: pip install 'dataload[plot]' (or only matplotlib)\n"
    assert result.stdout == ""
    text_of(config)


LENGTHS = (9, 0, 5, 40, 7, 31, 1, 7)  # 100 records
PADDED = {"mode": "pack", "chunk": 4, "ends": "pad"}


@pytest.fixture
def streams(tmp_path):
    """A config of 6 rows that follow sequences."""
    np.save(tmp_path / "lengths.npy", LENGTHS)
    path = tmp_path / "streams.toml"
    path.write_text(
        '[source]\npath = "range:100"\n[sampler]\nkind = "streams"\nlengths = "lengths.npy"\n'
        "[loader]\nbatch_size = 6\nseed = 3\n"
    )
    return path


def settings(**values):
    return [word for name, value in values.items() for word in ("--set", f"sampler.{name}={value}")]


def served(config, *overrides, epoch=0):
    """The columns of an epoch's batches, steps first, as a loader gives them."""
    with dataload.from_config(config, overrides=[word for word in overrides if word != "--set"]) as loader:
        loader.set_epoch(epoch)
        batches = list(loader)
    return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(
    "overrides",
    [settings(), settings(**PADDED), settings(mode="independent", chunk=3), settings(shuffled_rows=2, chunk=5)],
    ids=["split", "pack", "independent", "mixture"],
)
def test_the_facts_of_streams_are_those_of_the_batches(streams, overrides, epoch):
    found = facts("order", streams, "--epoch", epoch, *overrides)
    report = found["streams"]
    columns = served(streams, *overrides, epoch=epoch)
    steps, rows = columns["stream_id"].shape
    chunk = columns["index"].size // (steps * rows)
    continues = columns.get("is_stream", np.ones((steps, rows), bool))[0]
    valid = columns["valid"].reshape(steps, rows, chunk)
    begins = columns["is_first"].reshape(steps, rows, chunk)[:, continues].sum()
    assert (report["epoch"], report["steps"], report["rows"], report["chunk"]) == (epoch, steps, rows, chunk)
    assert (report["continuing"], report["beginnings"]) == (continues.sum(), begins)
    assert report["run_records"] == pytest.approx(valid[:, continues].sum() / begins)
    assert report["run_steps"] == pytest.approx(valid[:, continues].any(axis=2).sum() / begins)
    assert report["filler"] == pytest.approx(1 - valid.mean())
    assert report["per_batch"] == pytest.approx(np.mean([len({*ids} - {-1}) for ids in columns["stream_id"].tolist()]))
    assert (report["sequences"], report["shortest"], report["longest"]) == (7, 1, 40)
    counts = np.bincount(columns["index"].reshape(valid.shape)[valid], minlength=100)
    assert report["multiplicity"]["repeated"] == np.count_nonzero(counts > 1)
    assert report["multiplicity"]["never"] == np.count_nonzero(counts == 0)
    pairs = np.stack([columns["stream_id"], columns["offset"]], axis=2)
    assert found["first_rows"] == pairs[:3].tolist()


def test_streams_of_several_orders_in_words(streams, tmp_path):
    text = text_of(streams, *settings(shuffled_rows=2, **PADDED))
    assert ", 4 records per row\n" in text
    assert "\ncontinuing: 4 of 6 rows; the others take chunks from anywhere\n" in text
    text = text_of(streams, *settings(mode="shuffled", chunk=4, ends="pad"))
    assert "\nbeginnings: every chunk, because no row continues\n" in text
    text = text_of(streams, "--set", "loader.batch_size=9", *settings(mode="pack"))
    assert text.splitlines()[3].count(" -") == 2, "two rows have no sequence"
    assert "\nfiller: none\n" in text_of(streams, "--set", "loader.batch_size=5")
    np.save(tmp_path / "lengths.npy", [100])
    endless = settings(mode="independent", epoch_steps=30)
    assert "\nbeginnings: none\n" in text_of(streams, "--set", "loader.batch_size=1", "--epoch", 1, *endless)
    long = ["--set", "source.path=range:8000000", "--set", "loader.batch_size=8"]
    np.save(tmp_path / "lengths.npy", np.full(8000, 1000))
    text = text_of(streams, *long)
    assert " in 8,000 sequences of 1,000 records; epoch 0 has 1,000,000 steps of 8 rows on 1 rank\n" in text
    assert "\nnote: all figures are from a sample of 32,760 steps\n" in text
    report = facts("order", streams, *long)["streams"]
    assert (report["looked_at"], report["sampled"], report["multiplicity"]["never"]) == (32760, True, None)
    assert report["run_records"] == report["run_steps"] == pytest.approx(1000, rel=0.2)


def test_steps_of_streams_keep_rows_in_their_places(streams):
    columns = served(streams, *settings(**PADDED))
    steps = len(columns["index"])
    together = lines(streams, *settings(**PADDED), "--steps", f"0:{steps}")
    for name in ("stream_id", "offset", "is_first"):
        assert [line[name] for line in together] == columns[name].tolist()
    assert [line["indices"] for line in together] == columns["index"].reshape(steps, -1).tolist()
    assert [line["valid"] for line in together] == columns["valid"].reshape(steps, -1).tolist()
    # The same rows on three ranks, of which each has its third.
    thirds = ["--set", "loader.batch_size=2", "--world-size", 3, *settings(**PADDED), "--steps", f"0:{steps}"]
    assert [line["indices"] for line in lines(streams, *thirds)] == [line["indices"] for line in together]
    mine = lines(streams, *thirds, "--rank", 1)
    assert [line["stream_id"] for line in mine] == columns["stream_id"][:, 1::3].tolist()


@pytest.mark.slow_suite
def test_the_picture_of_streams_carries_the_data(streams, tmp_path):
    text_of(streams, "--picture", tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    parts = (
        StreamSampler(sequence_lengths=LENGTHS, rows=4, seed=3, **PADDED),
        StreamSampler(sequence_lengths=LENGTHS, rows=2, mode="shuffled", chunk=4, ends="pad"),
    )
    order = RowMixture(parts=parts)
    figure = stream_figure(order, stream_report(order), "rows")
    (axes,) = figure.axes
    plans = order.plans(range(order.steps(0)), epoch=0)
    (image,) = axes.images
    stream_id = np.stack([plan.columns["stream_id"] for plan in plans], axis=1)
    assert image.get_array().filled(-1).tolist() == np.where(stream_id < 0, -1, stream_id % 5).tolist()
    assert image.get_extent() == [0, len(plans), 5.5, -0.5]
    separators, beginnings = axes.collections
    starts = {(x, (y0 + y1) / 2) for (x, y0), (_, y1) in beginnings.get_segments()}
    expected = {
        (plan.step + place / 4, row)
        for plan in plans
        for row, place in zip(*np.nonzero(plan.columns["is_first"]), strict=True)
        if row < 4
    }
    assert {(x, round(y, 9)) for x, y in starts} == expected
    assert len(separators.get_segments()) == 5
    for text in axes.texts:  # the number of the sequence that the row follows there
        x, y = text.get_position()
        assert stream_id[int(y), int(x)] == int(text.get_text())
    assert axes.texts
    title, about = figure.texts
    assert title.get_text().startswith("Rows continue: each starts a new sequence every ")
    assert about.get_text() == f"rows: all {len(plans)} steps"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step of epoch 0", "row of all ranks")
    assert_no_overlap(figure)


def test_the_picture_of_many_long_rows_shows_some(tmp_path):
    order = StreamSampler(sequence_lengths=[50] * 10_000, rows=100, mode="pack")
    figure = stream_figure(order, stream_report(order), "long")
    (image,) = figure.axes[0].images
    assert image.get_array().shape == (64, 500)
    assert figure.texts[1].get_text() == "long: steps 0 to 499 of 5,000, rows 0 to 63 of 100"
