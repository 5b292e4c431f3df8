"""Parts of a source: disjoint, stable or exact, alike in classes, with whole groups."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dataload
from dataload import ConfigError, MemorySource, RangeSource

SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}


def indices_of(parts):
    return {name: set(part.indices.tolist()) for name, part in parts.items()}


def people(count, groups, classes, seed=0):
    rng = np.random.default_rng(seed)
    people, labels = rng.integers(groups, size=count), rng.integers(classes, size=count)
    return MemorySource({"x": np.arange(count), "person": people, "label": labels})


@given(st.integers(300, 3000), st.integers(0, 3), st.integers(1, 500))
def test_parts_by_index_are_disjoint_and_stable(count, seed, more):
    parts = indices_of(RangeSource(count).split(SHARES, seed=seed))
    assert sorted(index for part in parts.values() for index in part) == [*range(count)]
    later = indices_of(RangeSource(count + more).split(SHARES, seed=seed))
    assert all(part == {index for index in later[name] if index < count} for name, part in parts.items())


def test_two_parts_are_those_of_one_share():
    source = RangeSource(1000)
    parts = source.split({"a": 0.9, "b": 0.1}, seed=3)
    for part, expected in zip(parts.values(), source.split(0.9, seed=3), strict=True):
        assert part.indices.tolist() == expected.indices.tolist()
    assert parts["a"].fingerprint() != parts["b"].fingerprint() != source.split({"a": 0.8, "b": 0.2})["b"].fingerprint()
    assert (
        parts.report.splitlines()[0] == f"a: {len(parts['a'])} of 1,000 records, {len(parts['a']) / 10:.2f}% for 90.00%"
    )


@given(st.integers(10, 2000), st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(0, 2))
def test_exact_parts_have_their_counts(count, weights, seed):
    shares = {f"{number}": weight / sum(weights) for number, weight in enumerate(weights)}
    if min(shares.values()) * count < 1:
        return
    parts = RangeSource(count).split(shares, seed=seed, exact=True)
    assert sum(map(len, parts.values())) == count
    assert all(abs(len(part) - share * count) < 1 for part, share in zip(parts.values(), shares.values(), strict=True))


@given(st.integers(200, 1500), st.integers(1, 12), st.integers(0, 2))
def test_classes_have_their_shares_to_one_record(count, classes, seed):
    source = people(count, 5, classes, seed)
    labels = np.array([int(record["label"]) for record in source])
    parts = source.split(SHARES, seed=seed, stratify="label")
    assert sorted(np.concatenate([part.indices for part in parts.values()]).tolist()) == [*range(count)]
    for name, share in SHARES.items():
        within = labels[parts[name].indices]
        assert abs(len(within) - share * count) < classes
        for label in range(classes):
            assert abs((within == label).sum() - share * (labels == label).sum()) < 1 + 1e-9


def test_groups_stay_together_and_where_they_are():
    source = people(5000, 400, 3)
    person = source.read_batch(range(5000))["person"]
    parts = source.split(SHARES, group="person")
    of = {name: {*person[part.indices].tolist()} for name, part in parts.items()}
    assert sum(map(len, of.values())) == len({*person.tolist()})
    assert abs(len(parts["train"]) / 5000 - 0.8) < 0.08
    text = MemorySource([{"key": f"{value}"} for value in person[:700].tolist()])
    by = text.split(SHARES, by="key")  # as text, in other records, the same people
    assert all({int(record["key"]) for record in part} <= of[name] for name, part in by.items())
    folds = source.k_fold(5, group="person", seed=1)
    assert sorted(index for _, out in folds for index in out.indices.tolist()) == [*range(5000)]
    for train, out in folds:
        assert not {*person[train.indices].tolist()} & {*person[out.indices].tolist()}
        assert len(train) + len(out) == 5000


def test_groups_with_classes_come_near_to_both():
    source = people(4000, 300, 4)
    batch = source.read_batch(range(4000))
    parts = source.split(SHARES, group="person", stratify="label")
    seen = [{*batch["person"][part.indices].tolist()} for part in parts.values()]
    assert len(set.union(*seen)) == sum(map(len, seen))
    for name, share in SHARES.items():
        counts = np.bincount(batch["label"][parts[name].indices], minlength=4)
        assert (np.abs(counts - share * np.bincount(batch["label"])) < 15).all()
    assert ["; label " in line and " records off" in line for line in parts.report.splitlines()] == [True] * 3


def test_exact_parts_of_groups_come_as_near_as_groups_allow():
    source = people(4000, 300, 4)
    person = source.read_batch(range(4000))["person"]
    parts = source.split(SHARES, group="person", exact=True)
    seen = [{*person[part.indices].tolist()} for part in parts.values()]
    assert len(set.union(*seen)) == sum(map(len, seen))
    assert sum(map(len, parts.values())) == 4000
    assert max(abs(len(parts[name]) - share * 4000) for name, share in SHARES.items()) <= np.bincount(person).max() / 2
    assert parts.report.splitlines()[0].startswith("train: 3,")


def test_records_without_a_group_are_one_group():
    found = np.tile([np.nan, 1.0, 2.0], 30_000)  # more than are read at once
    parts = MemorySource({"g": found}).split({"a": 0.5, "b": 0.5}, seed=0, group="g", exact=True)
    assert sorted(int(np.isnan(found[part.indices]).sum()) for part in parts.values()) == [0, 30_000]


def test_texts_may_be_missing_wherever_they_are():
    source = MemorySource([{"t": text} for text in [None, "b", "b", None] * 10])
    parts = source.split({"a": 0.5, "b": 0.5}, seed=0, stratify="t")
    assert [sum(source[i]["t"] is None for i in part.indices) for part in parts.values()] == [10, 10]


def test_folds():
    source = RangeSource(103)
    for settings, counts in (({"exact": True}, {20, 21}), ({}, None)):
        folds = source.k_fold(5, **settings)
        assert sorted(index for _, out in folds for index in out.indices.tolist()) == [*range(103)]
        assert all({*train.indices.tolist()} == {*range(103)} - {*out.indices.tolist()} for train, out in folds)
        assert counts is None or {len(out) for _, out in folds} == counts
        for number, (line, (_, out)) in enumerate(zip(folds.report.splitlines(), folds, strict=True)):
            assert line == f"fold {number}: {len(out)} of 103 records, {len(out) / 103:.2%} for 20.00%"
    with pytest.raises(ConfigError, match="folds must be an integer >= 2, got 1"):
        source.k_fold(1)
    with pytest.raises(ConfigError, match="a fold of 5 records would be empty: choose fewer folds, exact=True or"):
        RangeSource(5).k_fold(10)


def test_a_split_by_a_field_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": np.arange(500) % 3, "x": np.arange(500.0)}), path)
    from dataload.catalog import arrays

    monkeypatch.setattr(arrays, "_SETTLED_SECONDS", -1)
    parts = dataload.open(path).split(SHARES, stratify="label")
    (kept,) = tmp_path.glob(".dataload.filter-*.arrays")
    monkeypatch.setattr(dataload.sources.views.split, "codes_of", None)
    again = dataload.open(path).split(SHARES, stratify="label")
    assert indices_of(again) == indices_of(parts)
    kept.write_bytes(b"")
    with pytest.raises(TypeError):
        dataload.open(path).split(SHARES, stratify="label")


@pytest.mark.parametrize(
    ("shares", "settings", "message"),
    [
        ({"a": 0.5, "b": 0.4}, {}, "the shares of a split must be numbers by name that add up to 1, got"),
        ({"a": 1.0}, {}, "the shares of a split must be numbers by name that add up to 1, got"),
        ({"a": 0, "b": 1}, {}, "the share of 'a' must be a number above 0 and at most 1, got 0"),
        ({"a": "x", "b": 1}, {}, "the share of 'a' must be a number above 0 and at most 1, got 'x'"),
        (0.5, {"exact": True}, "the shares of a split must be numbers by name that add up to 1, got 0.5"),
        ({"a": 0.999, "b": 0.001}, {"exact": True}, "the part 'b' of 10 records would be empty"),
        ({"a": 0.5, "b": 0.5}, {"stratify": "q"}, "has no field 'q'"),
        ({"a": 0.5, "b": 0.5}, {"group": "index", "by": "index"}, "by is the same as group"),
        ({"a": 0.5, "b": 0.5}, {"by": 3}, "group must be text or None, got 3"),
        ({"a": 0.5, "b": 0.5}, {"strata": "x"}, "split has no setting 'strata'"),
    ],
)
def test_splits_that_do_not_work(shares, settings, message):
    with pytest.raises(ConfigError, match=message):
        RangeSource(10).split(shares, **settings)


def test_fields_that_are_no_values():
    source = MemorySource([{"x": np.zeros(2)}] * 9)
    with pytest.raises(ConfigError, match="records are split by numbers or text, and 'x' is neither"):
        source.split({"a": 0.5, "b": 0.5}, group="x")


def test_configs_select_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"label": {row % 4}, "row": {row}}}\n' for row in range(200)))
    shares = {"train": 0.75, "val": 0.25}
    section = {"condition": "label in [1, 2]", "shares": shares, "part": "val", "stratify": "label", "seed": 1}
    config = {"source": {"path": str(path), "select": section}, "loader": {"batch_size": 100}}
    with dataload.from_config(config) as loader:
        (batch,) = loader
    chosen = dataload.open(path).filter(dataload.field("label").isin([1, 2]))
    expected = chosen.split(shares, stratify="label", seed=1)["val"]
    assert batch["row"].tolist() == [record["row"] for record in expected]
    assert np.bincount(batch["label"]).tolist() == [0, 12, 13] or np.bincount(batch["label"]).tolist() == [0, 13, 12]
    folds = chosen.k_fold(4, group="row")
    for part, expected in (("test-3", folds[3][1]), ("train-3", folds[3][0])):
        section = {"condition": "label in [1, 2]", "folds": 4, "part": part, "group": "row"}
        with dataload.from_config({**config, "source": {"path": str(path), "select": section}}) as loader:
            assert next(iter(loader))["row"].tolist() == [record["row"] for record in expected]
    function = {"source": {**config["source"], "select": {"condition": "math:isfinite"}}}
    for overrides, message in (
        ({**config, **function}, "must be real number"),
        (
            {**config, "source": {"path": str(path), "select": {"shares": shares}}},
            "needs its name, and either shares or folds",
        ),
        (
            {**config, "source": {"path": str(path), "select": {"folds": 1, "part": "test-0"}}},
            "folds must be an integer",
        ),
        ({**config, "source": {"path": str(path), "select": {**section, "shares": shares}}}, "either shares or folds"),
        ({**config, "source": {"path": str(path), "select": {**section, "part": "tets-3"}}}, "part is 'tets-3': did"),
        ({**config, "source": {"path": str(path), "select": {"condition": "label ="}}}, "is not a condition such as"),
    ):
        with pytest.raises((ConfigError, TypeError), match=message):
            dataload.from_config(overrides)
