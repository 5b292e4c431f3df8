"""Small files that expand to huge ones: a sample of those of `make bombs`."""

from __future__ import annotations

import bombs
import bombs_of_records as records
import pytest
from bombs_of_parquet import bombs_of_parquet
from bombs_of_tables import bombs_of_arrow

WANTED = {
    "arrow": (
        lambda: bombs_of_arrow(2),
        [
            "list<null>",
            "struct<union<text>>",
            "union<large_list<text>>",
            "list<empty>",
            "list<dictionary<text>>",
            "view",
            "list_view<list_view<number>>",
            "dictionary<list<null>>",
            "map<dictionary<text>>",
            "view compressed",
            "dictionary<text> compressed",
            "64 columns with the same buffers",
        ],
    ),
    "parquet": (
        bombs_of_parquet,
        [
            "text dictionary required repeat 1",
            "text dictionary list repeat 2",
            "text prefixes list repeat 1",
            "int64 plain list nulls 1",
            "text dictionary optional dictionary 1",
            "int32 plain required page 2",
        ],
    ),
    "jsonl": (records.bombs_of_jsonl, ["x.jsonl.gz empty lines", "x.jsonl.zst short lines"]),
    "csv": (records.bombs_of_csv, ["x.csv.gz empty values", "x.csv.zst fewer columns"]),
}


@pytest.fixture(scope="module", autouse=True)
def _warm():
    bombs.warm_up()


@pytest.mark.parametrize("format", WANTED)
def test_bombs_keep_the_promise(format):  # noqa: A002
    every, names = WANTED[format]
    tried = 0
    for bomb in every():
        if bomb.name in names:
            tried += 1
            found = bombs.try_bomb(bomb)
            assert not found.broken, f"{bomb.name}: {found}"
    assert tried == len(names)
