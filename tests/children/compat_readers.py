"""Functions that run in the child processes of tests/integration/test_compat_processes.py."""

import os

syr = None  # the test puts a file here before it forks


def read_item(index):
    """Read an item as in the original's README: the file is a global and the index is a string."""
    return os.getpid(), syr.get_item(str(index))["features"].tolist()


def halved(features):
    return features / 2


def dims_and_label(message):
    pixels, label = message.protos
    return list(pixels.dims), int(label.byte_data)
