"""What children of tests/integration/test_compat_processes.py run: importable there."""

from __future__ import annotations

import os

syr = None  # the test puts a file here before it forks


def read_item(index):
    """As the original's README has it: the file is a global, the index is text."""
    return os.getpid(), syr.get_item(str(index))["features"].tolist()


def halved(features):
    return features / 2


def dims_and_label(message):
    pixels, label = message.protos
    return list(pixels.dims), int(label.byte_data)
