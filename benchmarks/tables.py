"""Tables: Parquet and Arrow beside pyarrow's own `take` of the same rows, JSON Lines beside `json.loads` alone."""

import importlib.util
import json
import os
from contextlib import ExitStack
from statistics import median
from time import process_time
from unittest import mock

import numpy as np

import dataload
from benchmarks.harness import ROOT, VERSION, Case, aim, batches, loaders, run_cases

COUNT = 100_000
ROWS = 256
FLOOR = 0.8
FILTERED = 2_000_000


def tables():
    import pyarrow as pa
    import pyarrow.parquet as pq

    plan = batches(COUNT, ROWS)
    table = _table(pa)
    ROOT.mkdir(exist_ok=True)
    rows = []
    for name, per_group in (("Arrow, one batch", COUNT), ("Arrow, batches of 1,000", 1_000), ("Parquet", 10_000)):
        path = ROOT / f"v{VERSION}-table-{per_group}{'.parquet' if name == 'Parquet' else '.arrow'}"
        if path.suffix == ".parquet":
            pq.write_table(table, path, row_group_size=per_group)
            stored = pq.read_table(path)
        else:
            with pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=per_group)
            stored = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        rows += _beside_take(name, stored, dataload.open(path), plan)
    return [*rows, *_wide(), *_json_lines(plan), *_texts(plan), *_filters()]


def _table(pa):
    """A number, 16 floats and about 500 bytes in each row."""
    rng = np.random.default_rng(0)
    vectors = pa.array(rng.random(16 * COUNT, np.float32))
    data = [rng.bytes(size) for size in rng.integers(450, 550, COUNT).tolist()]
    return pa.table({"n": np.arange(COUNT), "x": pa.FixedSizeListArray.from_arrays(vectors, 16), "data": data})


def _beside_take(name, stored, source, plan):
    def take():
        return ({"n": stored.take(rows)} for rows in plan)

    with ExitStack() as held:
        held.enter_context(source)
        cases = [
            Case("pyarrow's take of the table in memory", take),
            Case("source.read_batch", lambda: map(source.read_batch, plan), FLOOR),
            *loaders(held, source, ROWS, range(2), {}),
        ]
        return run_cases(f"{name}, {ROWS} rows of a number, 16 floats, 500 bytes", cases, same=None)


def _wide(count=10_000):
    """Hundreds of numbers in each row, in CPU time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    title, found, plan = f"Parquet, {ROWS} rows of many numbers, CPU time", [], batches(count, ROWS)
    print(f"\n{title}")
    for fields in (100, 500):
        path = ROOT / f"v{VERSION}-wide-{fields}.parquet"
        columns = {f"f{number}": np.arange(count, dtype=("f4", "i8")[number % 2]) for number in range(fields)}
        pq.write_table(pa.table(columns), path, row_group_size=count)
        with dataload.open(path) as source:
            seconds = []
            for _ in range(9):
                begun = process_time()
                for rows in plan:
                    source.read_batch(rows)
                seconds.append(process_time() - begun)
        mine = median(seconds[1:]) / len(plan) / fields * 1e6
        found.append(aim(title, f"{fields} fields: us for a field and batch", mine, most=1))
    return found


def _json_lines(plan):
    path = ROOT / f"v{VERSION}-table.jsonl"
    lines = [json.dumps({"n": n, "text": "some text of a record " * 4, "x": [0.5] * 8}).encode() for n in range(COUNT)]
    path.write_bytes(b"\n".join(lines))

    def loads():
        return ([json.loads(lines[row]) for row in rows.tolist()] for rows in plan)

    with dataload.open(path) as source:
        cases = [
            Case("json.loads of the lines in memory", loads),
            Case("source.read", lambda: map(source.read, plan), FLOOR),
        ]
        return run_cases(f"JSON Lines, {ROWS} rows of a number, text and a list", cases, same=None, rows=len)


def _texts(plan):
    """Three columns of text beside the same bytes, and with every string made, beside Hugging Face's."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = np.random.default_rng(0).integers(97, 123, (3, COUNT, 100), np.uint8)
    values = [[row.tobytes() for row in column] for column in data]
    paths = {kind: ROOT / f"v{VERSION}-{kind}.parquet" for kind in ("binary", "string")}
    for kind, path in paths.items():
        pq.write_table(pa.table({f"t{i}": pa.array(column).cast(kind) for i, column in enumerate(values)}), path)
    with ExitStack() as held:
        binary, text = (held.enter_context(dataload.open(path)) for path in paths.values())

        def strings(rows):
            return [list(column) for column in text.read_batch(rows).values()]

        title = f"Parquet, {ROWS} rows of three texts of 100 characters"
        columns = [
            Case("binary", lambda: map(binary.read_batch, plan)),
            Case("text", lambda: map(text.read_batch, plan), 1 / 1.3),
        ]
        rows = run_cases(title, columns, same=None)
        if importlib.util.find_spec("datasets") is None:
            return rows
        from datasets import load_dataset

        theirs = load_dataset("parquet", data_files=str(paths["string"]), split="train", cache_dir=str(ROOT / "hf"))
        theirs = theirs.with_format("numpy")
        made = [
            Case("datasets with format numpy", lambda: ([*theirs[rows].values()] for rows in plan)),
            Case("text, every string made", lambda: map(strings, plan), 3),
        ]
        return rows + run_cases(f"{title}, as strings", made, same=None, rows=lambda batch: len(batch[0]))


def _filters():
    """A condition beside pyarrow's own filter, and a function beside a loop over Python's values."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    path = ROOT / f"v{VERSION}-filter.parquet"
    labels = np.random.default_rng(0).integers(0, 10, FILTERED)
    pq.write_table(pa.table({"label": labels, "x": labels * 0.5}), path)
    column = pa.chunked_array([labels])

    def is_three(record):
        return record["label"] == 3

    def own(name, make, floor):
        return Case(name, lambda: [make()], floor)

    with dataload.open(path) as source, mock.patch.dict(os.environ, {"DATALOAD_CACHE": "0"}):
        condition, expression = dataload.field("label") == 3, pc.field("label") == 3
        conditions = [
            own("pyarrow.dataset", lambda: ds.dataset(path).to_table(columns=["label"], filter=expression), None),
            own("source.filter(condition)", lambda: source.filter(condition), 1 / 1.3),
        ]
        functions = [
            own("a loop over column.to_pylist()", lambda: [is_three({"label": v}) for v in column.to_pylist()], None),
            own("source.filter(function)", lambda: source.filter(is_three, fields=["label"]), 1 / 1.5),
        ]
        return [
            *run_cases("Filters of 2 million rows by a condition", conditions, same=None, rows=lambda _: FILTERED),
            *run_cases("Filters of 2 million rows by a function", functions, same=None, rows=lambda _: FILTERED),
        ]
