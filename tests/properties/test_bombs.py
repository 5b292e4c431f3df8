"""Small files that expand to huge ones: a sample of those of `make bombs`."""

import bombs
import pytest
from bombs_of_records import FORMATS
from samples import sampled

WANTED = {
    "arrow": """
        list<null>, struct<union<text>>, union<large_list<text>>, list<empty>, list<dictionary<text>>, view,
        dictionary<list<null>>, view compressed, 64 columns with the same buffers
    """,
    "parquet": """
        text dictionary required repeat 1, text dictionary list repeat 2, text prefixes list repeat 1,
        int64 plain list nulls 1, text dictionary optional dictionary 1, int32 plain required page 2
    """,
    "jsonl": "x.jsonl.gz empty lines, x.jsonl.zst short lines",
    "csv": "x.csv.gz empty values, x.csv.zst fewer columns",
    "syrah": "metadata: numbers in a list, metadata: nested shapes",
    "tfrecord": "tensorprotos product, length 4611686018427387905",
}


MORE = [
    ("parquet", "4000 columns, 40 columns"),
    ("tfrecord", "msgpack nested lists"),
    (
        "arrow",
        "list_view<list_view<number>>, map<dictionary<text>>, dictionary<text> compressed, 4000 columns compressed",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _warm():
    bombs.warm_up()


@pytest.mark.parametrize(
    ("name", "wanted"),
    sampled([*WANTED.items(), *MORE], [(name, WANTED[name]) for name in ("jsonl", "csv")]),
    ids=[*WANTED, *(f"{name}, more" for name, _ in MORE)],
)
def test_bombs_keep_the_promise(name, wanted):
    wanted = set(" ".join(wanted.split()).split(", "))
    tried = {bomb.name: bomb for bomb in FORMATS[name]()}
    assert wanted <= tried.keys()
    found = {each: bombs.try_bomb(tried[each]) for each in wanted}
    assert not {each: str(outcome) for each, outcome in found.items() if outcome.broken}
