"""Conversions in processes of their own, some of which are killed on the way."""

import os
import signal
import sys

import dataload
from dataload.catalog import ledger
from dataload.convert import convert


def run(source, destination, kill_at=None, errors=None, **options):
    """Convert, and kill this process once `kill_at` records are done.

    If the conversion is refused, write the message to the file `errors`, and exit with code 1.
    """

    def progress(done, total):
        if kill_at is not None and done >= kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    ledger._MOST_LINES = 1  # else what was noted in the last two seconds is not in the object store
    try:
        source = dataload.open(source) if isinstance(source, os.PathLike) else source
        convert(source, destination, progress=progress, **options)
    except dataload.errors.SourceError as error:
        errors.write_text(str(error))
        sys.exit(1)
