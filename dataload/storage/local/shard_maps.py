"""The mapped files of many shards as one file, from which a whole batch is copied at once."""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from dataload._util.arrays import pooled_empty
from dataload.errors import MachineError, SourceError
from dataload.storage.core import PLACE_BITS, compiled_core, core
from dataload.storage.errors import file_errors, outside_error
from dataload.storage.local.record_files import STEPS_BETWEEN_PROBES, FileIdentity, MappedFile, is_cold, open_regular
from dataload.storage.paths import encoded_paths
from dataload.storage.record_file import RecordFile
from dataload.types import Array, BytesArray, Int64Array

_USUAL_MAPS = 65530
_DROPPED_SHARE = 8  # an eighth of the maps is dropped at once, so that a batch rarely pays for it


def most_maps() -> int:
    """Return how many files are mapped at once: half of what the system allows a process."""
    with suppress(OSError, ValueError), open("/proc/sys/vm/max_map_count", encoding="ascii") as stream:
        return int(stream.read()) // 2
    return _USUAL_MAPS // 2


class ShardMaps(RecordFile):
    """The files of shards as one file. Its offsets are places: the shard's number times 2^44, plus the offset there."""

    # Maps hold no descriptors. At most `most` files stay mapped; those used least recently are unmapped first. Once a
    # second, a read looks whether the files that it reads were overwritten.

    path: str = "several shards"

    def __init__(self, shards: int, most: int | None = None) -> None:
        self.size: int = shards << PLACE_BITS
        self._maps = compiled_core().Maps(shards)
        self._files: dict[int, MappedFile] = {}
        self._used = np.zeros(shards, np.int64)  # number of the read that used each last; 0: it is not mapped
        self._reads = 1
        self._mapped = 0
        self._most = most_maps() if most is None else most
        self._lock = threading.Lock()
        self._warm_reads = 0

    def add(self, shard: int, file: MappedFile) -> bool:
        """Add the file of a shard, and close it; return whether it could be mapped."""
        with self._lock:
            self._files[shard] = file
            self._reads += 1
            return self._map(shard)

    def add_alike(self, known: int, shards: Int64Array, paths: Sequence[str]) -> Int64Array:
        """Add files like that of a known shard; return their versions, see `versions_of`, zeros where that fails."""
        found = np.zeros((len(shards), 5), np.int64)
        with self._lock:
            if paths and self._mapped + len(shards) <= self._most:
                self._maps.open(found, shards, encoded_paths(map(os.path.abspath, paths)))
            for shard, path, (size, changed, _, device, inode) in zip(
                shards.tolist(), paths, found.tolist(), strict=True
            ):
                if inode:
                    self._files[shard] = self._files[known].moved(path, FileIdentity(size, changed, (device, inode)))
                    self._mapped += not self._used[shard]
                    self._used[shard] = self._reads
        return found[:, :3]

    def drop(self, shards: Int64Array) -> None:
        """Unmap the files of shards, if they are mapped."""
        with self._lock:
            self._drop(shards[self._used[shards] > 0])

    def _drop(self, shards: Int64Array) -> None:
        for shard in shards.tolist():
            self._maps.drop(shard)
        self._used[shards] = 0
        self._mapped -= len(shards)

    def has_all(self, shards: int) -> bool:
        """Return whether so many files are mapped, and none of them is to be unmapped."""
        return self._mapped == shards

    def use(self, shards: Int64Array) -> bool:
        """Map the files of shards, (rows,) int64, which were added; return whether so many may be mapped."""
        if len(self._files) <= self._most and self._used[shards].all():  # no thread unmaps any
            return True
        with self._lock:
            return self._map_all(shards)

    def _map_all(self, shards: Int64Array) -> bool:
        """See `use`."""
        self._reads += 1
        is_mapped = self._used[shards] > 0
        if not is_mapped.all() and len(np.unique(shards)) > self._most:
            return False
        self._used[shards[is_mapped]] = self._reads  # first, so that they stay mapped
        return all(self._map(shard) for shard in np.unique(shards[~is_mapped]).tolist())

    def _map(self, shard: int) -> bool:
        """Map the file of a shard; return False if the system refuses."""
        if self._used[shard] == 0:
            file = self._files[shard]
            try:
                with file_errors(file.path):
                    file.map_for(self._maps, shard)
            except MachineError as error:
                if getattr(error.__cause__, "errno", None) != errno.ENOMEM:
                    raise
                return False
            self._mapped += 1
        self._used[shard] = self._reads
        if self._mapped > self._most:
            others = np.flatnonzero((self._used > 0) & (self._used < self._reads))
            dropped = others[np.argsort(self._used[others])[: max(1, self._most // _DROPPED_SHARE)]]
            self._drop(dropped)
        return True

    def gather(self, offsets: Int64Array, length: int) -> Array:
        out = pooled_empty((len(offsets), length), np.uint8)
        self._call(self._maps.gather, offsets, length, out)
        return out

    def copies(self, offsets: Int64Array, lengths: Int64Array) -> list[bytes]:
        return list(self.gather_ranges(offsets, lengths))

    def _gather(self, out: Array, start: int, stride: int, length: int, indices: Int64Array) -> None:
        self._call(self._maps.gather, start + indices * stride, length, out)

    def _gather_ranges(self, out: Array, offsets: Int64Array, lengths: Int64Array) -> None:
        self._call(self._maps.gather_ranges, offsets, lengths, out)

    def _cut(self, offsets: Int64Array, length: int, out: BytesArray, *fields: Any) -> int:
        return self._call(self._maps.cut, offsets, length, out, *fields)

    def _call(self, function: Callable[..., Any], places: Int64Array, lengths: Any, out: Array, *fields: Any) -> Any:
        try:
            self._hint(places, lengths)
            try:
                return function(out, places, lengths, *fields)
            except LookupError:  # since `use`, another thread has unmapped a file
                with self._lock:
                    self._map_all(places >> PLACE_BITS)
                    return function(out, places, lengths, *fields)
        except (core().MapFault, ValueError, LookupError) as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> SourceError:
        if not isinstance(error, core().MapFault):
            return outside_error(self.path, self.size, error)
        shard, offset = map(int, str(error).split())
        return self._files[shard].error_at(offset)

    def _hint(self, places: Int64Array, lengths: Int64Array | int) -> None:
        """Ask the kernel to load cold ranges together; if a probed offset is cached, skip the next reads."""
        if len(places) < 2:
            return
        if self._warm_reads > 0:
            self._warm_reads -= 1  # threads may lose a count to each other, which does no harm
            return
        last = int(places[-1])
        with suppress(OSError, KeyError):  # deleted, or not a place
            descriptor = open_regular(self._files[last >> PLACE_BITS].path)
            try:
                cold = is_cold(descriptor, last & ((1 << PLACE_BITS) - 1))
            finally:
                os.close(descriptor)
            if cold:
                self._maps.will_need(places, np.broadcast_to(lengths, places.shape).astype(np.int64))
                return
        self._warm_reads = STEPS_BETWEEN_PROBES

    def release(self) -> None:
        """Do nothing: maps need no descriptors, and go with the last reference."""
