"""``dataload index`` beside DALI's wds2idx.py: see tar/README.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dataload.cli.app import app

GOLDEN = Path(__file__).parent / "tar"
TARS = json.loads((GOLDEN / "manifest.json").read_text())["tars"]

# Archives that are damaged, hold no sample, or have names that no index can hold; DALI's tool writes what cannot be
# read, lacks samples, or fails.
REFUSED = {
    *("bad_checksum_first", "bad_checksum_mid", "garbage_noeof", "not_a_tar", "text", "unpadded_last"),
    *("trunc_data", "trunc_hdr_only", "trunc_header", "trunc_lastdata"),
    *("empty0", "empty_eof", "one_zero", "part_empty"),
    *("space_ext", "spaces"),
}
TORN_APART = {"dup", "nonadjacent"}  # written with --no-strict

BEHIND_ONE_BLOCK_OF_ZEROS = """\
jpg 9728 {} late0.jpg cls 10752 {} late0.cls
jpg 11776 {} late1.jpg cls 12800 {} late1.cls
"""


def expected(tar):
    """What DALI's tool wrote, put right."""
    text = (GOLDEN / (TARS[tar].get("true_idx") or TARS[tar]["wds2idx"]["idx"])).read_text()
    if tar == "tars/noext.tar":  # the file "000002" and the files "000002.jpg", "000002.cls" have one key
        return text.replace("v1.2 8", "v1.2 7").replace("8 000002\njpg", "8 000002 jpg")
    if tar == "tars/mid_zero1.tar":  # ends at the first block of zeros, where two end an archive
        sizes = [size for name, _, _, size in late_members(GOLDEN / tar) if name.startswith("late")]
        return text.replace("v1.2 4", "v1.2 6") + BEHIND_ONE_BLOCK_OF_ZEROS.format(*sizes)
    return text


def late_members(path):
    """Name, type, offset and size of the members behind the first block of zeros, by the plain layout of headers."""
    data = path.read_bytes()
    position = data.index(b"late0.jpg")
    while data[position : position + 512].strip(b"\0"):
        header = data[position : position + 512]
        size = int(header[124:135], 8)
        yield header[:100].rstrip(b"\0").decode(), header[156:157], position + 512, size
        position += 512 + (size + 511) // 512 * 512


def index(*arguments):
    return CliRunner().invoke(app, ["index", *map(str, arguments)])


@pytest.mark.filterwarnings("ignore:.*no_eof.tar ends without blocks of zeros:UserWarning")
def test_the_indexes_are_those_of_dalis_tool(tmp_path, monkeypatch):
    monkeypatch.chdir(GOLDEN)
    assert index(*TARS, "-d", tmp_path).exit_code == 1
    written = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    wanted = [tar for tar in TARS if Path(tar).stem not in REFUSED | TORN_APART]
    assert written == {Path(tar).stem: expected(tar) for tar in wanted}


@pytest.mark.parametrize("name", sorted(TORN_APART))
def test_an_index_of_torn_samples_is_that_of_dalis_tool_if_it_is_asked_for(name, tmp_path, monkeypatch):
    monkeypatch.chdir(GOLDEN)
    result = index(f"tars/{name}.tar", "-d", tmp_path, "--no-strict")
    assert result.exit_code == 0, result.output
    assert (tmp_path / f"{name}.idx").read_bytes() == Path(f"idx/{name}.idx").read_bytes()


def test_an_index_goes_beside_its_archive(tmp_path):
    (tmp_path / "a.b.tar").write_bytes((GOLDEN / "tars/plain_ustar.tar").read_bytes())
    assert index(tmp_path / "a.b.tar").exit_code == 0
    assert (tmp_path / "a.b.idx").read_bytes() == (GOLDEN / "idx/plain_ustar.idx").read_bytes()
