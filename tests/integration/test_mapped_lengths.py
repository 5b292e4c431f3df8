"""Lengths of what a transform makes: measured once by `dataload stats --map`, and packed by."""

import json
import os
import sys
import time

import numpy as np
import pytest
from chat_tokenizers import make
from command_line import facts, fail, ok

import dataload
from dataload import ConfigError, Loader, MemorySource, Pack, WorkerError
from dataload.samplers import GlobalShuffle, PackedBatchSampler
from dataload.sources.views.mapped import Measured
from dataload.text import Chat, FillInTheMiddle, Preference

TALKS = [
    [{"role": "user", "content": "a" * (i % 7)}, {"role": "assistant", "content": "Blue sky. " * (1 + i % 11)}]
    for i in range(60)
]

MODULE = """
from chat_tokenizers import make
from dataload.text import Chat, FillInTheMiddle

chat = Chat(make())
gaps = FillInTheMiddle(make(), text="messages")

def answer(sample):
    return {"text": sample["messages"][1]["content"]}
"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A file of conversations, written some time ago, and a module `talks_map` with transforms."""
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    os.utime(path, (1_700_000_000, 1_700_000_000))
    (tmp_path / "talks_map.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("talks_map", None)


def expected(transform=None):
    transform = transform or Chat(make())
    return [len(transform({"messages": talk})["input_ids"]) for talk in TALKS]


def test_lengths_are_measured_once_and_packing_uses_them(data, monkeypatch):
    printed = ok("stats", data, "--map", "talks_map:chat")
    low, high = min(expected()), max(expected())
    assert ["input_ids", str(low), "to", str(high)] in [line.split()[:4] for line in printed.splitlines()]
    assert printed.splitlines()[-1] == "kept"
    transform = Chat(make())
    source = dataload.open(str(data))
    monkeypatch.setattr(Chat, "__call__", None)  # nothing is measured again
    lengths = dataload.record_lengths(source, "labels", transform=transform)
    assert lengths.tolist() == expected_lengths
    assert ok("stats", data, "--map", "talks_map:chat").splitlines()[-1] == "kept, as found in an earlier run"
    monkeypatch.undo()
    sampler = PackedBatchSampler(
        sampler=GlobalShuffle(len(source), seed=0), lengths=lengths, row_length=256, batch_size=2, strategy="best-fit"
    )
    loader = Loader(source, sampler=sampler, transform=transform, collate=Pack({"labels": -100}))
    batches = list(loader)
    assert sum(int(batch["segment_ids"].max(axis=1).sum()) for batch in batches) == len(TALKS)
    assert sum(np.count_nonzero(batch["segment_ids"]) for batch in batches) == lengths.sum()


expected_lengths = expected()


def test_lengths_of_data_that_were_just_written_are_kept(data):
    changed = time.time() - 1.2  # nothing is kept for two seconds: the file may change again within a tick of the clock
    os.utime(data, (changed, changed))
    assert ok("stats", data, "--map", "talks_map:chat").splitlines()[-1] == "kept"


def test_functions_are_kept_by_their_code(data, monkeypatch):
    from talks_map import answer

    source = dataload.open(str(data))
    first = dataload.record_lengths(source, "text", transform=[answer])
    assert first.tolist() == [len(talk[1]["content"]) for talk in TALKS]
    monkeypatch.setattr(type(source), "__iter__", None)  # no record is read again
    assert dataload.record_lengths(source, "text", transform=[answer]).tolist() == first.tolist()
    with pytest.raises(ConfigError, match="the transform makes no field 'tokens': choose from text"):
        dataload.record_lengths(source, "tokens", transform=[answer])


def test_lengths_in_memory_are_measured_each_time():
    source = MemorySource([{"messages": talk} for talk in TALKS])
    assert dataload.record_lengths(source, "labels", transform=Chat(make())).tolist() == expected_lengths
    with pytest.raises(ConfigError, match="the transform 'FillInTheMiddle' takes a context, so lengths may change"):
        dataload.record_lengths(source, "labels", transform=FillInTheMiddle(make()))
    with pytest.raises(ConfigError, match="must return a dict of fields, got list"):
        dataload.record_lengths(source, "labels", transform=lambda sample: [1])


def test_bad_conversations_count_nothing(data):
    lines = data.read_text().splitlines()
    lines[3] = json.dumps({"messages": [{"role": "user", "content": "a"}]})
    data.write_text("\n".join(lines) + "\n")
    os.utime(data, (1_700_000_000, 1_700_000_000))
    message = fail(1, "stats", data, "--map", "talks_map:chat").output
    assert "failed in transform 'Chat' on index 3" in message
    assert "field 'messages' has no assistant turn" in message
    with pytest.raises(ConfigError, match="no assistant turn") as found:
        dataload.record_lengths(dataload.open(str(data)), "labels", transform=Chat(make()))
    assert found.value.__notes__ == [f"The transform failed on index 3 ({data}, record 3)."]
    printed = ok("stats", data, "--map", "talks_map:chat", "--on-error", "skip")
    assert printed.splitlines()[-2:] == ["1 bad record, of length 0", "kept"]
    lengths = dataload.record_lengths(dataload.open(str(data)), "input_ids", transform=Chat(make()))
    assert lengths.tolist() == [*expected_lengths[:3], 0, *expected_lengths[4:]]


def padded(source, transform, **more):
    """Batches of all tokens and labels, as lists with their dtypes."""
    padding = {"input_ids": dataload.Pad(0), "labels": dataload.Pad(-100), "attention_mask": dataload.Pad(0)}
    with Loader(source, batch_size=7, shuffle=True, transform=transform, collate=padding, **more) as loader:
        return [{name: (x.dtype, x.tolist()) for name, x in batch.items()} for batch in loader]


def without_calls(monkeypatch):
    """Let transforms fail if a conversation is rendered."""
    for kind in (Chat, Preference):
        monkeypatch.setattr(kind, "__call__", lambda *_: pytest.fail("rendered again"))


@pytest.mark.parametrize("template", ["chatml", "gemma_training"])
def test_a_loader_restores_what_was_measured(data, monkeypatch, template):
    source, transform = dataload.open(str(data)), Chat(make(template))
    first = padded(source, transform)
    some, both = source[[5, 3, 3, 40]], dataload.concat([source[50:], source])
    of_some, of_both = padded(some, transform), padded(both, transform)
    dataload.record_lengths(source, "labels", transform=transform)
    dataload.record_lengths(source[50:], "labels", transform=transform)
    without_calls(monkeypatch)
    assert padded(source, Chat(make(template))) == first
    assert padded(source, Chat(make(template)), num_workers=2, executor="fork") == first
    assert (padded(some, transform), padded(both, transform)) == (of_some, of_both)
    assert dataload.record_lengths(some, "labels", transform=transform).tolist() == [
        dataload.record_lengths(source, "labels", transform=transform)[i] for i in (5, 3, 3, 40)
    ]


def test_what_was_not_measured_is_rendered(data, tmp_path, monkeypatch):
    source, transform = dataload.open(str(data)), Chat(make())
    first = padded(source, transform)
    monkeypatch.setattr("dataload.sources.views.mapped.MOST_BYTES", 2000)
    assert dataload.record_lengths(source, "labels", transform=transform).tolist() == expected_lengths
    rendered = []
    monkeypatch.setattr(Chat, "__call__", lambda *a, call=Chat.__call__: rendered.append(1) or call(*a))
    assert padded(source, transform) == first
    assert 30 < len(rendered) < 60  # the others had room
    rendered.clear()
    assert padded(source, transform, fields=["messages"]) == first  # without tools, if records had some
    assert len(rendered) == 60
    (file,) = tmp_path.glob(".dataload.filter-*")
    content = file.read_bytes()
    file.write_bytes(content[:-100] + bytes(100))
    rendered.clear()
    assert padded(source, transform) == first  # a damaged sample is made anew
    assert 30 < len(rendered) < 60
    with Loader(
        source, batch_size=1, transform=transform, collate={"labels": "ragged", "input_ids": "ragged"}
    ) as loader:
        ok("cache", "prune", tmp_path, "--all")
        assert not file.exists()
        assert len(list(loader)) == 60


def test_samples_are_kept_as_far_as_they_have_room(monkeypatch):
    monkeypatch.setattr("dataload.sources.views.mapped.MOST_BYTES", 10)
    measured = Measured(3)
    measured.add(np.arange(3), {}, [b"x" * 6, b"y" * 5, b"z" * 4])
    assert [*measured.samples()] == [b"x" * 6, b"", b"z" * 4]


def test_the_newest_results_stay_while_they_have_room(data, tmp_path, monkeypatch):
    monkeypatch.setattr("dataload.catalog.arrays.MOST_BYTES", 40_000)
    source = dataload.open(str(data))
    for number, template in enumerate(("chatml", "llama3", "phi3")):
        dataload.record_lengths(source, "labels", transform=Chat(make(template)))
        files = sorted(tmp_path.glob(".dataload.filter-*"), key=lambda path: path.stat().st_mtime_ns)
        assert len(files) == min(number + 1, 2)
        assert sum(path.stat().st_size for path in files) < 40_000
    assert ok("stats", data, "--map", "talks_map:chat").splitlines()[-1] == "kept"  # the oldest was deleted


@pytest.mark.slow_suite
def test_processes_measure_more_than_512_records(data):
    lines = data.read_text().splitlines(keepends=True)
    data.write_text("".join(lines * 9))
    os.utime(data, (1_700_000_000, 1_700_000_000))
    assert "bad" not in ok("stats", data, "--map", "talks_map:chat")
    lengths = dataload.record_lengths(dataload.open(str(data)), "labels", transform=Chat(make()))
    assert lengths.tolist() == expected_lengths * 9


def test_samples_of_a_subclass_that_returns_more_are_not_kept(data):
    class Weighted(Chat):
        def __call__(self, sample):
            return {**super().__call__(sample), "weight": np.ones(1)}

    source = dataload.open(str(data))
    assert dataload.record_lengths(source, "weight", transform=Weighted(make())).tolist() == [1] * 60
    batch = next(iter(Loader(source, batch_size=1, transform=Weighted(make()))))
    assert batch["weight"].tolist() == [[1]]


@pytest.mark.slow_suite
def test_an_engine_measures_in_parts(data, monkeypatch):
    lines = data.read_text().splitlines()
    lines[3] = json.dumps({"messages": [{"role": "user", "content": "a"}]})
    data.write_text("\n".join(lines) + "\n")
    os.utime(data, (1_700_000_000, 1_700_000_000))
    engine = ("--map", "talks_map:chat", "--engine", "local:parts=2")
    assert "part 1/2" in fail(1, "stats", data, *engine).output
    printed = ok("stats", data, *engine, "--on-error", "skip")
    assert printed.splitlines()[-2:] == ["1 bad record, of length 0", "kept"]
    source, transform = dataload.open(str(data)), Chat(make())
    lengths = [*expected_lengths[:3], 0, *expected_lengths[4:]]
    assert dataload.record_lengths(source, "labels", transform=transform).tolist() == lengths
    good = source[[*range(3), *range(4, 60)]]
    monkeypatch.setenv("DATALOAD_CACHE", "0")
    first = padded(good, transform)
    monkeypatch.delenv("DATALOAD_CACHE")
    without_calls(monkeypatch)
    assert padded(good, transform) == first


def test_stats_as_json_and_what_it_refuses(data):
    (found,) = facts("stats", data, "--map", "talks_map:chat")
    ends = {"shortest": min(expected_lengths), "longest": max(expected_lengths), "total": sum(expected_lengths)}
    assert found["fields"] == dict.fromkeys(("input_ids", "labels", "attention_mask"), ends)
    assert (found["records"], found["bad"]) == (60, 0)
    for wrong, told in (
        (["--map", "talks_map:gaps"], "takes a context, so lengths may change with the epoch"),
        (["--map", "talks_map:chatt"], "talks_map has no 'chatt': did you mean 'chat'"),
        (["--map", "talks_map:chat", "--on-error", "replace"], "--on-error is 'replace'"),
        (["--map", "talks_map:chat", "--no-save"], "--map keeps the lengths of all records: leave out"),
    ):
        assert told in " ".join(fail(2, "stats", data, *wrong).output.split())


def test_a_config_packs_by_the_lengths_of_a_map(data):
    settings = {
        "source": {"path": str(data)},
        "sampler": {"kind": "packing", "length_of": "input_ids", "length_map": "talks_map:chat", "row_length": 256},
        "loader": {"batch_size": 2, "transform": "talks_map:chat", "pad_value": {"labels": -100}},
    }
    with dataload.from_config(settings) as loader:
        assert sum(np.count_nonzero(batch["segment_ids"]) for batch in loader) == sum(expected_lengths)
    with pytest.raises(ConfigError, match=r"sampler\.length_map: length_map is 'talks_map:no'"):
        dataload.from_config(settings, overrides=["sampler.length_map=talks_map:no"])


def test_wrong_lengths_are_noticed(data):
    source = dataload.open(str(data))
    lengths = dataload.record_lengths(source, "labels", transform=Chat(make()))
    sampler = PackedBatchSampler(
        sampler=GlobalShuffle(len(source), seed=0), lengths=lengths, row_length=256, batch_size=2
    )
    other = Loader(source, sampler=sampler, transform=Chat(make("llama3")), collate=Pack(0))
    with pytest.raises(WorkerError, match=r"cannot pack field 'input_ids': .* compute the lengths again"):
        list(other)


def test_conversations_of_tables_are_those_of_json_lines(data, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    call = {"id": "1", "function": {"name": "look", "arguments": "{}"}}
    talks = [[*talk, {**talk[-1], "tool_calls": [call]}] for talk in TALKS[:3]]  # others have no calls: nulls
    pq.write_table(pa.Table.from_pylist([{"messages": talk} for talk in talks]), tmp_path / "talks.parquet")
    for transform in (Chat(make()), Chat(make("qwen2_5"))):
        source = dataload.open(str(tmp_path / "talks.parquet"))
        for record, talk in zip(source, talks, strict=True):
            assert transform(record)["labels"].tolist() == transform({"messages": talk})["labels"].tolist()
