"""Tables from one format to another, in the commands and in configs."""

import numpy as np
import tables  # noqa: F401 - starts what pyarrow keeps
from command_line import facts, ok
from written import written

import dataload
from dataload.convert import convert
from dataload.testing.compare import difference

RECORDS = [{"x": np.arange(6, dtype=np.float32) + i, "n": i, "text": f"é{i}"} for i in range(40)]


def test_a_table_goes_through_every_format(tmp_path):
    written(tmp_path / "a.parquet", RECORDS, group_bytes=300)
    names = ("b.arrow", "c.jsonl.gz", "d.jsonl.zst", "e.jsonl", "f.parquet")
    for before, after in zip(("a.parquet", *names), (*names, "g.tar"), strict=True):
        with dataload.open(tmp_path / before) as source:
            convert(source, tmp_path / after, shards=2 if after == "f.parquet" else None)
        if after == "f.parquet":
            assert dataload.open(tmp_path / "f-*.parquet").shard_lengths == (20, 20)
            break
        with dataload.open(tmp_path / after) as source:
            found = [(np.asarray(r["x"], np.float32), int(r["n"]), r["text"]) for r in source]
            assert difference(found, [(r["x"], r["n"], r["text"]) for r in RECORDS], after) is None
    assert ok("verify", tmp_path / "f-*.parquet").startswith("40 records in 2 files: all can be read")


def test_commands_and_configs(tmp_path):
    (tmp_path / "a.csv").write_text("x;label\n1;a\n2;b\n3;a\n")
    shown = facts("inspect", tmp_path / "a.csv", "-o", "delimiter=;")
    assert (shown["format"], shown["records"], sorted(shown["fields"])) == ("csv", 3, ["label", "x"])
    ok("convert", tmp_path / "a.csv", tmp_path / "b.parquet", "-o", "delimiter=;")
    table = {"source": {"path": str(tmp_path / "a.csv"), "delimiter": ";", "dtypes": {"x": "float32"}}}
    with dataload.from_config({**table, "loader": {"batch_size": 3}}) as loader:
        [batch] = loader
    assert batch["x"].dtype == np.float32
    assert batch["label"] == ["a", "b", "a"]
