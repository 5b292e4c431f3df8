"""Facts about shards, and about the fields of their records."""

import hashlib
import itertools

import pytest

from dataload.catalog.checks import ContentMark
from dataload.catalog.evidence import ends_of_file, is_same
from dataload.catalog.facts import (
    Evidence,
    Found,
    ShardFacts,
    common_classes,
    compare,
    require_known,
    row_bytes,
    select_fields,
    with_classes,
)
from dataload.errors import ConfigError
from dataload.storage import Remote, storage_of
from dataload.types import FieldSpec

UNKNOWN, EQUAL, OTHER = range(3)
SIDES = [*itertools.product((UNKNOWN, EQUAL, OTHER), repeat=3)]


def evidence(tag, time):
    return Evidence((0, 17, 18)[time], (None, '"e"', '"x"')[tag])


def mark(content):
    return (None, ContentMark(10, "ab", ("a", "b")), ContentMark(10, "cd", ("a", "b")))[content]


def expected(before, now):
    """The first rule that knows both sides decides; other times decide nothing, because copies have other times."""
    for known, one, other in zip(("etag", "time", "content"), before, now, strict=True):
        if UNKNOWN not in (one, other) and (known != "time" or one == other):
            return "same" if one == other else "changed"
    return "unknown"


@pytest.mark.parametrize("before", SIDES)
def test_the_first_rule_that_knows_both_sides_decides(before):
    facts = ShardFacts("a", 10, 3, "ab" * 32, mark(before[2]), evidence(*before[:2]))
    assert compare(facts, None) == "changed"
    for now in SIDES:
        found = Found(10, evidence(*now[:2]), mark(now[2]))
        assert compare(facts, found) == expected(before, now)
        assert compare(facts, found._replace(bytes=11)) == "changed"


def test_shards_are_equal_whatever_their_evidence():
    one, other = (ShardFacts("a", 10, 3, evidence=evidence(tag, tag), skipped=tag) for tag in (EQUAL, OTHER))
    assert one == other != ShardFacts("a", 10, 4)


def test_objects_of_stores_without_etags_are_compared_by_size_and_ends():
    pytest.importorskip("obstore")
    url, remote = "memory://facts/a", Remote.of(None, None)
    storage_of(url, remote).replace(url, bytes(10_000), None)
    size, ends = ends_of_file(url, remote)
    assert ends == hashlib.blake2b(bytes(8192), digest_size=8).hexdigest(), "as in manifests of earlier versions"
    for mark, same in ((ContentMark(size, ends, "x"), True), (ContentMark(size, "ab", "x"), False), (None, False)):
        assert is_same(ShardFacts("a", size, 3, content=mark), url, remote) is same


def test_fields_are_chosen_in_order_and_unknown_ones_are_told():
    require_known(["a", "b"], ["b", "a", "c"])
    require_known([], [])
    with pytest.raises(ConfigError, match=r"^there is no field 'lable': did you mean 'label'\?") as caught:
        require_known(["x", "lable", "other"], {"x": 1, "label": 2})
    assert (caught.value.key, caught.value.value) == ("fields", "lable")
    for owner, text in (("data.syr", r"^data\.syr has no field 'y'"), ([1], r"^\[1\] has no field 'y'")):
        with pytest.raises(ConfigError, match=text) as caught:
            require_known(["y"], ["x"], owner, key="offsets")
        assert caught.value.key == "offsets"
    assert [*select_fields({"a": 1, "b": 2, "c": 3}, ["c", "a"]).items()] == [("c", 3), ("a", 1)]
    with pytest.raises(ConfigError, match="records are int, not fields: choose a codec to read fields a, b"):
        select_fields(3, ["a", "b"])
    with pytest.raises(ConfigError):
        select_fields({"a": 1}, ["b"])


NUMBERS, TEXT, NAMED = FieldSpec("int64", ()), FieldSpec("str", ()), FieldSpec("uint8", (), ("x", "y"))


def test_the_bytes_of_a_record_are_those_of_its_arrays():
    fields = {"x": FieldSpec("float32", (3, None)), "n": NUMBERS, "word": TEXT, "any": FieldSpec("int16")}
    assert row_bytes(fields) == 3 * 4 + 8 + 2


def test_classes_of_fields():
    fields = {"label": NUMBERS, "word": TEXT, "known": NAMED, "other": NUMBERS}
    found = with_classes(fields, {"label": ("a",), "word": ("a",), "known": ("a",)})
    assert found == {**fields, "label": FieldSpec("int64", (), ("a",))}
    parts = [("a.tar", {"label": NAMED, "x": TEXT}), ("b.tar", {"label": NUMBERS}), ("c.tar", {"label": NAMED})]
    assert common_classes(parts, "paths") == {"label": ("x", "y")}
    other = [*parts, ("d.tar", {"label": FieldSpec("int64", (), ("y", "x"))})]
    with pytest.raises(ConfigError, match=r"'label' stands for other classes in a\.tar than in d\.tar: open") as caught:
        common_classes(other, "paths")
    assert caught.value.key == "paths"
