"""The bombs of each format."""

from __future__ import annotations

import bombs_of_records as records
from bombs_of_parquet import bombs_of_parquet
from bombs_of_tables import bombs_of_arrow

FORMATS = {
    "jsonl": records.bombs_of_jsonl,
    "csv": records.bombs_of_csv,
    "zip": records.bombs_of_zip,
    "tar": records.bombs_of_tar,
    "tfrecord": records.bombs_of_tfrecord,
    "syrah": records.bombs_of_syrah,
    "lmdb": records.bombs_of_lmdb,
    "array_record": records.bombs_of_array_record,
    "mds": records.bombs_of_mds,
    "hugging_face": records.bombs_of_hugging_face,
    "manifest": records.bombs_of_manifest,
    "wids": records.bombs_of_wids,
    "tokens": records.bombs_of_tokens,
    "arrow": bombs_of_arrow,
    "parquet": bombs_of_parquet,
}
