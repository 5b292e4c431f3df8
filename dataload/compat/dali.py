"""DALI's ``fn.readers.webdataset`` without DALI: its keywords, its samples, its shards and epochs.

```python
from dataload.compat.dali import webdataset

pipe = webdataset(paths=["a.tar"], index_paths=["a.idx"], ext=["jpg;png", "cls"], batch_size=32)
images, labels = next(pipe)  # or pipe.run()
```

A batch is a tuple of outputs, an output a list of `batch_size` arrays of one dimension: the bytes of a file, which
decoding is left to. Where DALI's answer is an accident, the sane one is given:

- the order of `random_shuffle` and `shuffle_after_epoch` has the same bounds and is another one for the same seed;
- an archive without members has no samples, where DALI makes an empty one of it;
- one file that fills two outputs is lacking in neither;
- without an index, hidden files are never components, and PAX names and sizes in base 256 count;
- an offset or a size beyond the archive is found at the start and not when its sample is read, a negative `shard_id`
  is refused, and an index of version 1.2 may lack the names, as DALI's documentation shows it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Self

from dataload._util.checks import check_count
from dataload._util.randomness import check_seed
from dataload.compat._dali_arguments import check_flags, check_missing, check_needless, check_outputs, pair_indexes
from dataload.compat._dali_order import EpochPlan, IndexStream
from dataload.compat._dali_source import OutputSource
from dataload.errors import ConfigError
from dataload.types import Array

__all__ = ["WebdatasetReader", "webdataset"]

_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def webdataset(
    *,
    paths: _Paths,
    ext: str | Sequence[str],
    batch_size: int,
    index_paths: _Paths | None = None,
    missing_component_behavior: str = "",
    dtypes: Any = None,
    case_sensitive_extensions: bool = True,
    num_shards: int = 1,
    shard_id: int = 0,
    stick_to_shard: bool = False,
    pad_last_batch: bool = False,
    random_shuffle: bool = False,
    initial_fill: int = 1024,
    seed: int = -1,
    shuffle_after_epoch: bool = False,
    shuffle_after_epoch_seed: int | None = None,
    lazy_init: bool = False,
    dont_use_mmap: bool = False,
    read_ahead: bool = False,
    prefetch_queue_depth: int = 1,
    skip_cached_images: bool = False,
    preserve: bool = False,
    bytes_per_sample_hint: int | Sequence[int] = 0,
    tensor_init_bytes: int = 1 << 20,
    device: str | None = None,
    name: str | None = None,
) -> WebdatasetReader:
    """Read tar archives of samples as DALI does.

    What only tells DALI how to work is checked and needless here: `dont_use_mmap`, `read_ahead`,
    `prefetch_queue_depth`, `skip_cached_images`, `preserve`, `bytes_per_sample_hint`, `tensor_init_bytes`, `device`
    and `name`.

    Args:
        paths: One archive or several.
        ext: For each output the extensions that it takes, parted by semicolons. Of several files of a sample that have
            one of them the first in the archive is read, with a warning.
        batch_size: Samples of a batch.
        index_paths: An index for each archive; none scans the archives.
        missing_component_behavior: What a sample that lacks an output does: "empty" (or "") gives an array without
            elements, "skip" leaves the sample out, "error" refuses to start.
        dtypes: For each output its type, "UINT8" by default: a name, one of DALI's or one of numpy's.
        case_sensitive_extensions: False compares extensions in lower case.
        num_shards: The samples of all archives together are cut into so many parts of nearly one size.
        shard_id: The part to read.
        stick_to_shard: Read it in each epoch; otherwise the next part follows.
        pad_last_batch: Fill each epoch up to whole batches, as many in each part, with its last sample.
        random_shuffle: Draw samples from a pool of the next `initial_fill` ones.
        initial_fill: Samples in the pool: one comes at most so many less 1 early.
        seed: Of that order; -1 takes another one each time.
        shuffle_after_epoch: Bring the archives into another order for each epoch. Implies `stick_to_shard`, which
            cannot be given with it.
        shuffle_after_epoch_seed: Of that order, the same for all shards.
        lazy_init: Open the archives at the first batch.

    Raises:
        ConfigError: An argument is wrong, or there are fewer samples than shards.
        SourceNotFoundError: There is no such archive or index.
        CorruptFileError: An archive or index contradicts its format or the other.
    """
    check_flags(
        case_sensitive_extensions=case_sensitive_extensions,
        stick_to_shard=stick_to_shard,
        pad_last_batch=pad_last_batch,
        random_shuffle=random_shuffle,
        shuffle_after_epoch=shuffle_after_epoch,
        lazy_init=lazy_init,
        dont_use_mmap=dont_use_mmap,
        read_ahead=read_ahead,
        skip_cached_images=skip_cached_images,
        preserve=preserve,
    )
    check_needless(device, name, bytes_per_sample_hint, prefetch_queue_depth, tensor_init_bytes)
    if shuffle_after_epoch and stick_to_shard:
        raise ConfigError("shuffle_after_epoch and stick_to_shard exclude each other", key="shuffle_after_epoch")
    num_shards = check_count("num_shards", num_shards, least=1)
    pool_size = check_count("initial_fill", initial_fill, least=1, below=1 << 31)
    archives_seed = check_seed(0 if shuffle_after_epoch_seed is None else shuffle_after_epoch_seed)
    plan = EpochPlan(
        batch_size=check_count("batch_size", batch_size, least=1),
        num_shards=num_shards,
        shard_id=check_count("shard_id", shard_id, least=0, below=num_shards),
        stick=stick_to_shard or shuffle_after_epoch,
        pad=pad_last_batch,
        pool_size=pool_size if random_shuffle else None,
        seed=secrets.randbits(63) if check_seed(seed) == -1 else seed,
        archives_seed=archives_seed if shuffle_after_epoch else None,
    )
    source = OutputSource(
        paths,
        pair_indexes(paths, index_paths),
        check_outputs(ext, dtypes, case_sensitive=case_sensitive_extensions),
        missing=check_missing(missing_component_behavior),
        case_sensitive=case_sensitive_extensions,
    )
    reader = WebdatasetReader(source, plan)
    if not lazy_init:
        reader.reader_meta()
    return reader


class WebdatasetReader(Iterator[tuple[list[Array], ...]]):
    """Batches without an end; made by `webdataset`, and in the place of a pipeline that has one reader.

    Dropping it releases the archives, as `close` and the end of a ``with`` block do.
    """

    def __init__(self, source: OutputSource, plan: EpochPlan) -> None:
        self._source = source
        self._plan = plan
        self._stream: IndexStream | None = None

    def __next__(self) -> tuple[list[Array], ...]:
        samples = self._source.read(self._indices().take(self._plan.batch_size))
        return tuple(map(list, zip(*samples, strict=True)))

    def run(self) -> tuple[list[Array], ...]:
        """The next batch: for each output a list of arrays, (elements,) each, the caller's own."""
        return next(self)

    def reader_meta(self, name: str | None = None) -> dict[str, int]:  # noqa: ARG002 - there is one reader
        """Sizes and settings under the names that DALI has for them."""
        stream, plan = self._indices(), self._plan
        return {
            "epoch_size": stream.samples,
            "epoch_size_padded": stream.samples_padded,
            "number_of_shards": plan.num_shards,
            "shard_id": plan.shard_id,
            "pad_last_batch": int(plan.pad),
            "stick_to_shard": int(plan.stick),
        }

    def epoch_size(self, name: str | None = None) -> int:
        """Samples of all shards together, padded where `pad_last_batch` says so."""
        return self.reader_meta(name)["epoch_size_padded"]

    def close(self) -> None:
        """Release the archives; a further batch raises `ClosedSourceError`."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _indices(self) -> IndexStream:
        if self._stream is None:
            self._stream = IndexStream(self._plan, self._source.shard_lengths)
        return self._stream
