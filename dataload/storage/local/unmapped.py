"""Records read from a file that is not mapped."""

import os
from collections.abc import Callable

from dataload.storage.errors import changed_error, file_errors
from dataload.storage.local.reopened import Handle, ReopenedFile
from dataload.storage.ranges import Runs
from dataload.storage.records import MergedReads
from dataload.types import BytesArray


class UnmappedFile(ReopenedFile[Handle], MergedReads):
    """A file that is read by `pread`, in few calls; see `RecordFile`. No change of the file can kill the process."""

    gap = 4096  # reading a page more is faster than another call

    def __init__(self, path: str, make: Callable[[str], Handle] = Handle) -> None:
        super().__init__(path, make)

    def _fill(self, buffer: BytesArray, runs: Runs) -> None:
        handle = self._open()
        at = 0
        with file_errors(self.path):
            for start, stop in zip(runs.starts.tolist(), runs.stops.tolist(), strict=True):
                self._read_into(handle.descriptor, buffer[at : at + stop - start], start)
                at += stop - start
        if error := self._changed(handle):
            raise error

    def _read_into(self, descriptor: int, target: BytesArray, offset: int) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(descriptor, [target[done:].data], offset + done)
            if not count:
                raise changed_error(self.path, self.size, os.fstat(descriptor).st_size)
            done += count
