"""Facts about a shard, compared with what a look finds."""

import hashlib
import itertools

import pytest

from dataload.catalog.checks import ContentMark
from dataload.catalog.evidence import ends_of_file, is_same
from dataload.catalog.facts import Evidence, Found, ShardFacts, compare
from dataload.storage import Remote, storage_of

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
