"""Any manifest survives its JSON, and merging parts gives the whole."""

import json
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st
from made_files import JSON

from dataload.catalog.checks import ContentMark
from dataload.catalog.facts import DataSetFacts, Evidence, Found, ShardFacts
from dataload.catalog.manifest import Manifest
from dataload.errors import CorruptFileError
from dataload.storage.paths import leads_elsewhere
from dataload.types import FieldSpec

NAMES = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(
    lambda name: not name.startswith(".") and not leads_elsewhere(name)
)
ETAGS = st.none() | st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=40)
HASHES = st.none() | st.text("0123456789abcdef", min_size=64, max_size=64)
COUNTS = st.integers(0, 1 << 50)
MARKS = st.none() | st.builds(
    ContentMark,
    COUNTS,
    st.text("0123456789abcdef"),
    st.none() | st.text(max_size=9) | st.lists(st.text(max_size=9), max_size=2),
)
SHARDS = st.builds(ShardFacts, NAMES, COUNTS, COUNTS, HASHES, MARKS, ETAGS.map(lambda tag: Evidence(0, tag)))
SPECS = st.builds(
    FieldSpec,
    st.sampled_from(["float32", "bytes", "str", "unknown", "<U7", "datetime64[ns]"]),
    st.none() | st.lists(st.none() | COUNTS, max_size=5).map(tuple),
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "codec": st.sampled_from(["npz", "tensorprotos"]),
        "window": COUNTS,
        "shapes": st.dictionaries(st.text(max_size=5), st.lists(st.integers(-1, 99), max_size=3)),
    },
)


@st.composite
def manifests(draw):
    shards = draw(st.lists(SHARDS, min_size=1, max_size=12, unique_by=lambda shard: shard.name))
    cuts = sorted(draw(st.sets(st.integers(1, len(shards)), max_size=2)) | {0, len(shards)})
    patterns = draw(st.lists(NAMES, min_size=len(cuts), max_size=len(cuts), unique=True))
    return Manifest(
        tuple(
            DataSetFacts.of(
                pattern,
                draw(NAMES),
                shards[start:stop],
                fields=draw(st.dictionaries(st.text(max_size=5), SPECS, max_size=3)),
                options=draw(OPTIONS),
            )
            for pattern, start, stop in zip(patterns, cuts, cuts[1:], strict=False)
        )
    )


@given(manifests())
def test_json_and_back(manifest):
    data = manifest.to_bytes()
    assert Manifest.parse(data, "m") == manifest
    assert Manifest.parse(json.dumps(json.loads(data), indent=1).encode(), "m") == manifest


@given(manifests(), st.data())
def test_a_stale_shard_is_found(manifest, data):
    entry = data.draw(st.sampled_from(manifest.data_sets))
    found = {shard.name: Found(shard.bytes, shard.evidence) for shard in entry.shards}
    assert list(entry.stale(found)) == []
    victim = data.draw(st.sampled_from(entry.shards))
    found[victim.name] = Found(victim.bytes + 1, victim.evidence)
    [line] = entry.stale(found)
    assert line.startswith(f"{victim.name} has ")
    del found[victim.name]
    assert list(entry.stale(found)) == [f"{victim.name} is missing"]


@given(manifests(), JSON, st.data())
def test_any_value_anywhere_is_accepted_or_refused(manifest, value, data):
    """The outcome is an error of the library, or a manifest that survives its JSON."""
    table = json.loads(manifest.to_bytes())
    inside = table
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(inside[key], (dict, list)) or not inside[key] or data.draw(st.booleans()):
            break
        inside = inside[key]
    inside[key] = value
    with suppress(CorruptFileError):
        found = Manifest.parse(json.dumps(table).encode(), "m")
        assert Manifest.parse(found.to_bytes(), "m") == found
        assert not any("/" in name or name.startswith(".") for entry in found.data_sets for name in entry.names)
