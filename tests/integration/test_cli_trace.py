"""``dataload trace`` and ``dataload certify`` as a user runs them."""

import json
import os
import re

import numpy as np
import pytest
from command_line import facts, fail, ok
from made_files import pack

import dataload
from dataload.analysis.trace import StepLosses, rank_by_loss


@pytest.fixture
def config(tmp_path, monkeypatch):
    """100 records in two files, batches of 8."""
    monkeypatch.chdir(tmp_path)
    for shard in range(2):
        with dataload.create(f"part-{shard}.syr") as writer:
            for index in range(shard * 50, shard * 50 + 50):
                writer.write({"x": np.full(3, index, np.float32), "label": index % 7})
    with open("train.toml", "w") as file:
        file.write('[source]\npath = "part-*.syr"\n[loader]\nbatch_size = 8\nshuffle = true\nseed = 3\n')
    return "train.toml"


def loader(**settings):
    return dataload.Loader(dataload.open("part-*.syr"), shuffle=True, seed=3, **{"batch_size": 8, **settings})


def test_a_record_is_found_in_the_batches_that_trained_on_it(config):
    found = facts("trace", config, "--index", 42, "--world-size", 4)
    assert found["location"]["record"] == 42
    assert [serving["epoch"] for serving in found["servings"]] == [0, 1, 2]
    for serving in found["servings"]:
        batch = loader(rank=serving["rank"], world_size=4).batch(serving["epoch"], serving["step"])
        assert batch["x"][serving["row"]].tolist() == [42.0] * 3
    assert facts("trace", config, "--index", 42, "--epochs", 1, "--steps", "900")["servings"] == []
    (serving,) = facts("trace", config, "--index", 70, "--epochs", 2)["servings"]
    heading, columns, values = ok("trace", config, "--index", 70, "--epochs", 2).splitlines()
    assert heading.startswith("record 70 (")
    assert "part-1.syr, record 20)" in heading
    assert heading.endswith("served 1 time in epoch 2")
    assert columns.split() == ["epoch", "step", "row"]
    assert values.split() == [str(serving[name]) for name in ("epoch", "step", "row")]


@pytest.mark.parametrize("action", ["raise", "replace"])
def test_excluded_records_are_not_served(config, action):
    settings = f"loader.exclude={[*range(0, 50, 3)]}", f"loader.on_error={action}"
    options = [part for each in settings for part in ("--set", each)]
    assert facts("trace", config, "--index", 42, *options)["servings"] == []
    assert "served 0 times in epochs 0:3, because exclude leaves it out" in ok("trace", config, "--index", 42, *options)
    for serving in facts("trace", config, "--index", 41, *options)["servings"]:
        step, row = serving["step"], serving["row"]
        batch = dataload.from_config(config, overrides=settings).batch(serving["epoch"], step)
        assert batch["x"][row].tolist() == [41.0] * 3
        shown = ok("show", config, "--epoch", serving["epoch"], "--step", step, *options).split("\nrow ")[row + 1]
        assert ("index 41: " in shown) == (action == "raise"), "a replaced record is not told from the others"
    with open("losses.csv", "w") as file:
        file.write("step,loss\n" + "".join(f"{step},{step % 2}\n" for step in range(26)))
    suspects = facts("trace", config, "--spike", "losses.csv", "--top", 100, *options)["records"]
    assert sorted(each["index"] for each in suspects) == [each for each in range(100) if each % 3 or each >= 50]


def test_a_state_that_changed_the_batch_size_counts(config):
    run_before = loader()
    iterator = iter(run_before)
    for _ in range(5):
        next(iterator)
    with open("state.json", "w") as file:
        json.dump(run_before.state_dict(), file)
    after = loader(batch_size=6)
    after.load_state_dict(run_before.state_dict())
    served = {}
    for step, batch in enumerate(after, after.step):
        served.update({int(x): (step, row) for row, x in enumerate(batch["x"][:, 0])})
    for index, (step, row) in list(served.items())[:5]:
        resumed = ["--set", "loader.batch_size=6", "--state", "state.json", "--epochs", 0]
        (serving,) = facts("trace", config, "--index", index, *resumed)["servings"]
        assert (serving["step"], serving["row"]) == (step, row)


def test_a_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pack("a.tar", dict.fromkeys(("one.txt", "two.txt", "three.txt"), b""))
    with open("tar.toml", "w") as file:
        file.write('[source]\npath = "a.tar"\n[loader]\nbatch_size = 2\n')
    assert "a.tar, record 1, key 'two'): served 1 time" in ok("trace", "tar.toml", "--key", "two", "--epochs", 0)
    assert "no record of" in (message := fail(2, "trace", "tar.toml", "--key", "tow").stderr)
    assert "did you mean 'two'" in message


def test_the_records_of_a_spike_are_found_and_excluded(config, monkeypatch):
    steps = loader()
    bad = {17, 60}
    losses = []
    for epoch in range(4):
        for step in range(13):
            x = steps.batch(epoch, step)["x"][:, 0].astype(int)
            losses.append((epoch, step, 1.0 + 5 * len(bad & set(x.tolist()))))
    with open("losses.csv", "w") as file:
        file.write("epoch,step,loss\n" + "".join(f"{epoch},{step},{loss}\n" for epoch, step, loss in losses))
    found = facts("trace", config, "--spike", "losses.csv", "--top", 2, "--exclude", "bad.jsonl")
    assert {each["index"] for each in found["records"]} == bad
    assert [each["steps"] for each in found["records"]] == [4, 4]
    assert {os.path.basename(each["name"]) for each in found["shards"]} == {"part-0.syr", "part-1.syr"}
    kept = {int(x) for batch in loader(exclude="bad.jsonl") for x in batch["x"][:, 0]}
    assert kept == set(range(100)) - bad
    # Steps without epochs count from the start of the run.
    flat = "step,loss\n" + "".join(f"{13 * epoch + step},{loss}\n" for epoch, step, loss in losses)
    whole = rank_by_loss(steps, StepLosses.parse(flat, steps), top=100)
    assert [each.index for each in whole.records[:2]] == [each["index"] for each in found["records"]]
    monkeypatch.setattr("dataload.analysis.trace._MOST_ADDED", 30)  # sums are then made in parts
    assert rank_by_loss(steps, StepLosses.parse(flat, steps), top=100) == whole
    assert re.search(r"mean loss .*±", ok("trace", config, "--spike", "losses.csv", "--top", 1))


def test_another_world_size_serves_what_was_certified(config):
    assert "wrote run.json: 13 steps of epoch 1" in ok(
        "certify", config, "--epoch", 1, "--steps", "0:13", "--output", "run.json"
    )
    for ranks in (1, 2, 4):
        size = ["--world-size", ranks, "--set", f"loader.batch_size={8 // ranks}"]
        assert "the same batches, bit for bit: steps 0:13 of epoch 1" in ok(
            "certify", config, "--check", "run.json", *size
        )
    assert (
        "choose world_size and loader.batch_size"
        in fail(2, "certify", config, "--check", "run.json", "--world-size", 2).stderr
    )
    with open("run.json") as file:
        assert len(file.read()) < 13 * 200 + 500


def test_another_order_or_other_data_are_named(config):
    ok("certify", config, "--steps", "0:13", "--output", "run.json")
    message = fail(1, "certify", config, "--check", "run.json", "--set", "loader.seed=4").stderr
    assert "step 0 of epoch 0: another sampler or seed: the step has other records than in the certificate" in message
    with dataload.create("part-1.syr", overwrite=True) as writer:
        for index in range(50, 100):
            writer.write({"x": np.full(3, index + (index == 77), np.float32), "label": index % 7})
    (serving,) = facts("trace", config, "--index", 77, "--epochs", 0)["servings"]
    message = fail(1, "certify", config, "--check", "run.json").stderr
    assert f"step {serving['step']} of epoch 0: row {serving['row']}, record 77 (" in message
    assert "has other values than in the certificate" in message
    with dataload.create("part-1.syr", overwrite=True) as writer:
        writer.write({"x": np.zeros(3, np.float32), "label": 1})
    assert "which has 7 steps here" in fail(1, "certify", config, "--check", "run.json").stderr


@pytest.mark.parametrize("change", [{"first": -3}, {"epoch": 1e30}, {"versions": 5}, {"steps": [{"rows": "A"}]}])
def test_a_damaged_certificate(config, change):
    ok("certify", config, "--steps", "0:1", "--output", "run.json")
    with open("run.json") as file:
        values = json.load(file)
    step = values["steps"][0]
    values |= {key: [{**step, **value[0]}] if key == "steps" else value for key, value in change.items()}
    with open("run.json", "w") as file:
        json.dump(values, file)
    assert "this is not a certificate of `dataload certify`" in fail(2, "certify", config, "--check", "run.json").stderr
