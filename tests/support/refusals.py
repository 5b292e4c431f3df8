"""Reads that are refused."""

import pytest

from dataload.errors import CorruptFileError


def refuses(source, rows, message, error=CorruptFileError, **attributes):
    """Both ways to read refuse these rows with one error, which has these attributes."""
    for read in (source.read, source.read_batch):
        with pytest.raises(error, match=message) as caught:
            read(rows)
        assert {name: getattr(caught.value, name) for name in attributes} == attributes
