"""Small text files."""

import os

import pytest

from dataload.storage.local.text import append_text, read_text


def test_text_is_appended(tmp_path):
    path = os.fspath(tmp_path / "a")
    for text in ("漢\n", "", "b"):
        append_text(path, text)
    assert read_text(path) == "漢\nb"


def test_text_that_is_written_in_part_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) - 5)
    with pytest.raises(OSError, match="only 2 of 7 bytes could be written"):
        append_text(os.fspath(tmp_path / "a"), "1234567")
