"""What DALI 2.4.0's webdataset reader gave, from the same archives and arguments: see tar/README.md."""

import contextlib
import hashlib
import json
from pathlib import Path

import pytest

from dataload.compat.dali import webdataset
from dataload.errors import ConfigError, DataloadError

pytestmark = pytest.mark.filterwarnings("ignore:.* ends without blocks of zeros:UserWarning")

GOLDEN = Path(__file__).parent / "tar"
ORACLE = json.loads((GOLDEN / "oracle.json").read_text())
BY_ID = {case["id"]: case for case in ORACLE["cases"]}

# Refused by DALI, and legal by its documentation.
READ_ALL_THE_SAME = "badidx/three_fields_v12"


def cases(*matches, group=None):
    found = [c for c in ORACLE["cases"] if c["match"] in matches and c["id"] != READ_ALL_THE_SAME]
    return [pytest.param(case, id=case["id"]) for case in found if group in (None, case["group"])]


@pytest.fixture(autouse=True)
def in_golden(monkeypatch):
    monkeypatch.chdir(GOLDEN)


def described(array):
    name = {"float32": "FLOAT"}.get(str(array.dtype), str(array.dtype).upper())
    return [hashlib.sha256(array.tobytes()).hexdigest(), name, list(array.shape)]


def opened(case):
    """The reader, and whether it warned of files that are passed over."""
    expectation = contextlib.nullcontext() if not case.get("warnings") else pytest.warns(match="several files of one")
    with expectation:
        reader = webdataset(**case["args"], batch_size=case["batch_size"])
        assert reader.reader_meta() == case["reader_meta"]
        assert reader.epoch_size() == case["epoch_size"]
    return reader


def integers(case):
    with opened(case) as reader:
        return [[int(array[0]) for array in reader.run()[0]] for _ in range(case["runs"])]


@pytest.mark.parametrize("case", cases("exact"))
def test_batches_are_those_of_dali(case):
    if "int_batches" in case:
        assert integers(case) == case["int_batches"]
        return
    with opened(case) as reader:
        for expected, batch in zip(case["batches"], reader, strict=False):
            found = [[described(array) for array in output] for output in batch]
            assert found == [[ORACLE["values"][value] for value in output] for output in expected]


@pytest.mark.parametrize("case", cases("error", "safe_error"))
def test_what_dali_refuses_or_dies_of_is_an_error(case):
    arguments = {**case["args"], "batch_size": case["batch_size"]}
    if not arguments.get("lazy_init"):
        with pytest.raises(DataloadError):
            webdataset(**arguments)
        return
    with webdataset(**arguments) as reader, pytest.raises(DataloadError):
        next(reader)


def test_an_index_without_names_is_read_as_dalis_documentation_shows_it():
    args = {**BY_ID[READ_ALL_THE_SAME]["args"], "batch_size": 12}
    with webdataset(**args) as reader, webdataset(**{**args, "index_paths": ["idx/plain_ustar.idx"]}) as right:
        assert [list(map(bytes, output)) for output in next(reader)] == [list(map(bytes, o)) for o in next(right)]


# Archives of which DALI makes something else without an index; ours gives the same either way.
@pytest.mark.parametrize("name", ["base256", "hidden_first", "hidden_subdir", "pax_longname"])
def test_where_dali_is_wrong_without_an_index_ours_reads_what_both_read_with_one(name):
    quirk, sane = BY_ID[f"read/{name}/inferred"], BY_ID[f"read/{name}/idx"]
    assert (quirk["match"], quirk["compare_with"]) == ("quirk", sane["id"])
    test_batches_are_those_of_dali({**sane, "args": quirk["args"]})


def test_an_archive_without_members_has_no_samples():
    quirk, sane = BY_ID["args/multi-with-empty"], BY_ID["args/multi-with-empty-skip"]
    test_batches_are_those_of_dali({**sane, "args": quirk["args"]})


@pytest.mark.parametrize("case", cases("quirk", group="casts"))
def test_numbers_are_not_rounded_and_texts_not_converted(case):
    with pytest.raises(ConfigError, match=r"must be (True or False|an integer .*), got (2|0\.5|1\.5|2\.5|'no'|'1')$"):
        webdataset(**case["args"], batch_size=case["batch_size"])


@pytest.mark.parametrize("name", ["skip", "error"])
def test_one_file_that_fills_two_outputs_is_lacking_in_neither(name):
    test_batches_are_those_of_dali(
        {**BY_ID["args/ext-same-twice"], "args": BY_ID[f"args/ext-same-twice-{name}"]["args"]}
    )


def epochs_of(case):
    values = [value for batch in integers(case) for value in batch]
    start = 0
    for epoch in case["epochs"]:
        stop = start + epoch["n"]
        padding = epoch.get("padding", 0)
        assert values[stop : stop + padding] == values[stop - 1 : stop] * padding
        yield values[start:stop], epoch
        start = stop + padding


@pytest.mark.parametrize("case", cases("statistics", group="shuffle"))
def test_the_pool_shuffles_within_the_bounds_of_dalis(case):
    orders = []
    for values, epoch in epochs_of(case):
        first, stop = epoch["range"]
        assert sorted(values) == list(range(first, stop))
        shifts = [value - first - place for place, value in enumerate(values)]
        assert max(shifts) <= case["args"]["initial_fill"] - 1
        mean, recorded = sum(map(abs, shifts)) / len(shifts), epoch["mean_abs_displacement"]
        assert recorded / 2 <= mean <= recorded * 2
        orders.append(shifts)
    assert len(orders) > 1
    assert (orders[0] != orders[1]) == (case["args"]["initial_fill"] > 1)


@pytest.mark.parametrize("case", cases("statistics", group="tarorder"))
def test_archives_change_their_order_each_epoch(case):
    orders = []
    for values, epoch in epochs_of(case):
        assert len(set(values)) == len(values)
        if "tars" in epoch:
            archives = [value // 4 for value in values[::4]]
            assert values == [4 * archive + i for archive in archives for i in range(4)]
            assert len(archives) == len(epoch["tars"])
        orders.append(values)
    assert len(set(map(tuple, orders))) == len(orders)


def order(name):
    return integers(BY_ID[name])


def test_orders_of_shards_and_seeds_differ_where_dalis_do():
    first, second = (BY_ID[f"tarorder/n2-i{shard}"] for shard in range(2))
    for (ours, _), (theirs, _) in zip(epochs_of(first), epochs_of(second), strict=True):
        assert sorted(ours + theirs) == list(range(24))
    assert order("tarorder/default") == order("tarorder/readerseed")
    assert order("tarorder/default") != order("tarorder/seed1") != order("tarorder/seed2")
    pool = "shuffle/f8-{}-n1-i0-roll-nopad-b5"
    assert order(pool.format("s42")) == order(pool.format("s42") + "-again") != order(pool.format("s43"))


def test_every_case_but_the_quirks_is_tested():
    assert len(cases("exact", "error", "safe_error", "statistics")) == 478
    assert {case["match"] for case in ORACLE["cases"]} == {"exact", "error", "safe_error", "statistics", "quirk"}
