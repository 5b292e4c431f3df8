"""Archives and indexes of the original tools, and what the original readers made of them: see tar/README.md."""

import hashlib
import json
from pathlib import Path

import pytest

from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.tar.header import scan
from dataload.sources.tar.reader import TarSource
from dataload.sources.tar.table import parse_index
from dataload.sources.tar.writer import write_index

pytestmark = pytest.mark.filterwarnings("ignore:.* (ends without blocks of zeros|several files for):UserWarning")

GOLDEN = Path(__file__).parent / "tar"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
ORACLE = json.loads((GOLDEN / "oracle.json").read_text())
WEBDATASET = json.loads((GOLDEN / "webdataset.json").read_text())["tars"]

# Archives that no reader may pass over; webdataset and tarfile pass over three.
DAMAGED = {
    "bad_checksum_first": 0,
    "bad_checksum_mid": 5120,
    "empty0": 0,
    "garbage_noeof": 8704,
    "not_a_tar": 0,
    "text": 0,
    "trunc_data": 7680,
    "trunc_hdr_only": 0,
    "trunc_header": 7680,
    "trunc_lastdata": 9216,
    "unpadded_last": 1024,
}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def stem(tar: str) -> str:
    return Path(tar).stem


@pytest.fixture(autouse=True)
def in_golden(monkeypatch):
    monkeypatch.chdir(GOLDEN)


@pytest.mark.parametrize(("name", "offset"), DAMAGED.items())
def test_scanning_a_damaged_archive_says_where(name, offset):
    with pytest.raises(CorruptFileError, match=f"tars/{name}.tar, byte {offset}: ") as caught:
        len(TarSource(f"tars/{name}.tar", index=False))
    assert caught.value.offset == offset


@pytest.mark.parametrize(
    "entry", [e for e in WEBDATASET if stem(e["tar"]) not in DAMAGED], ids=lambda entry: stem(entry["tar"])
)
def test_scanning_groups_as_webdataset_where_that_is_right(entry):
    name = stem(entry["tar"])
    source = TarSource(entry["tar"], index=False, case_sensitive=False)
    found = [[record.pop("__key__"), {field: sha(value)[:12] for field, value in record.items()}] for record in source]
    if name == "noext":  # webdataset passes over files without a dot
        keys = ["README", "000000", "LICENSE", "000001", "dir/Makefile", "dir/000000", "000002"]
        assert [key for key, _ in found] == keys
        assert list(found[-1][1]) == ["000002", "jpg", "cls"]
    elif name == "hidden_subdir":  # and takes hidden files in directories for components
        assert [key for key, _ in found] == ["dir/000000", "dir/000001"]
    elif name == "mid_zero1":  # and ends at one block of zeros
        assert found[:4] == entry["samples"]
        assert [key for key, _ in found[4:]] == ["late0", "late1"]
    elif name in ("dup", "upper_both"):  # and stops at these; DALI reads the first
        assert len(found) == 4
    else:
        assert found == entry["samples"]


# tarfile ends early at the one that is named.
@pytest.mark.parametrize("tar", [t for t in MANIFEST["tars"] if stem(t) not in {*DAMAGED, "mid_zero1"}], ids=stem)
def test_scanner_finds_the_members_that_pythons_tarfile_finds(tar):
    data = Path(tar).read_bytes()
    members = scan(lambda offset, length: data[offset : offset + length], len(data), tar)
    assert [[m.name.decode(), m.offset, m.size] for m in members] == [
        [name, offset, size]
        for name, kind, offset, size, _ in MANIFEST["tars"][tar]["members"]
        if kind in ("0", "\\0", "7")
    ]


# Archives of which we write no index -> why.
NO_INDEX = {
    "dup": "byte 1024: a second '000000.jpg' in one sample",
    "empty_eof": "holds no samples",
    "nonadjacent": "byte 2048: sample '000000' continues here after others",
    "one_zero": "holds no samples",
    "part_empty": "holds no samples",
    "space_ext": "member '000000.my jpg' .* white space",
    "spaces": "member 'my file 0.jpg' .* white space",
}


@pytest.mark.parametrize("tar", MANIFEST["tars"], ids=stem)
def test_our_index_is_that_of_dalis_tool(tar, tmp_path):
    name, info = stem(tar), MANIFEST["tars"][tar]
    if name in DAMAGED:
        with pytest.raises(CorruptFileError):
            write_index(tar, tmp_path / "x.idx")
    elif name in NO_INDEX:
        with pytest.raises((ConfigError, CorruptFileError), match=f"{tar}.*{NO_INDEX[name]}"):
            write_index(tar, tmp_path / "x.idx")
    else:
        count = write_index(tar, tmp_path / "x.idx")
        written = (tmp_path / "x.idx").read_bytes()
        assert len(TarSource(tar, index=[tmp_path / "x.idx"])) == count
        # wds2idx.py ends at one block of zeros, and parts a file without a dot from the sample whose key it is.
        if name not in ("mid_zero1", "noext"):
            assert written == Path(info.get("true_idx") or info["wds2idx"]["idx"]).read_bytes()
        return
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["dup", "nonadjacent"])
def test_our_index_without_strictness_is_that_of_dalis_tool(name, tmp_path):
    write_index(f"tars/{name}.tar", tmp_path / "x.idx", strict=False)
    assert (tmp_path / "x.idx").read_bytes() == Path(f"idx/{name}.idx").read_bytes()


@pytest.mark.parametrize("name", [stem(p) for p in MANIFEST["idx"] if p.startswith("idx/") and "bad_checksum" not in p])
def test_what_an_index_says_agrees_with_the_archive(name):
    """The default: indexes that are wrong are noticed, all others give what scanning gives."""
    tar = {"order": "tars/order/", "shards": "tars/shards/", "wds": "tars/wds_shards/"}.get(name.split("_")[0], "tars/")
    base = name.split(".")[0]
    if tar != "tars/" and not base.startswith("wds_tarwriter"):
        tar += base.split("_", 2 if base.startswith("wds") else 1)[-1] + ".tar"
    else:
        tar = f"tars/{base}.tar"
    if name in ("gnu_longname", "longlink"):
        with pytest.raises(CorruptFileError, match=rf"the index idx/{name}.idx \(line .*: dataload index {tar}"):
            len(TarSource(tar, index=f"idx/{name}.idx"))
    elif name in ("space_ext", "spaces"):
        with pytest.raises(CorruptFileError, match=f"idx/{name}.idx: line 2: "):
            len(TarSource(tar, index=f"idx/{name}.idx"))
    elif base in DAMAGED:
        return  # an index may well list what stands before the damage; see the oracle
    else:
        indexed = list(TarSource(tar, index=f"idx/{name}.idx"))
        scanned = list(TarSource(tar, index=False))
        if name == "types":  # wds2idx.py leaves out members of type 7
            lacking = [record.keys() - other.keys() for record, other in zip(scanned, indexed, strict=True)]
            assert lacking == [{"jpg"}, set()]
        elif name == "noext":
            assert len(indexed) == 8
        else:
            assert indexed == scanned[: len(indexed)]
            assert len(indexed) == (4 if name == "mid_zero1" else len(scanned))


INDEXES = [
    case["args"] for case in ORACLE["cases"] if case["match"] in ("error", "safe_error") and case["group"] == "badidx"
]


@pytest.mark.parametrize("args", INDEXES, ids=lambda args: stem(args["index_paths"][0]))
def test_an_index_that_dali_refuses_or_dies_of_is_an_error_at_open(args):
    index = args["index_paths"][0]
    if stem(index) == "three_fields_v12":  # as DALI's documentation shows it, not as DALI reads it
        return
    with pytest.raises(CorruptFileError, match=rf"{index}.*line .*dataload index"):
        len(TarSource(args["paths"], index=index, verify_index=False, fields=args["ext"]))


def test_an_index_of_version_1_2_may_lack_names_as_in_dalis_documentation():
    table = parse_index(Path("bad_idx/three_fields_v12.idx").read_bytes(), "x")
    assert table.keys is None
    without = list(TarSource("tars/plain_ustar.tar", index="bad_idx/three_fields_v12.idx"))
    assert without == list(TarSource("tars/plain_ustar.tar", index=False))  # keys come from the archive


@pytest.mark.parametrize(
    "name", ["missing", "multidot", "pax_mtime", "gnu_longname", "spaces", "zerolen", "plain_ustar"]
)
def test_keys_of_an_index_without_names_come_from_the_archive(name):
    assert list(TarSource(f"tars/{name}.tar", index=f"idx/{name}.v11.idx")) == list(
        TarSource(f"tars/{name}.tar", index=False)
    )


@pytest.mark.parametrize("name", ["offset_other", "wrong_name", "wrong_ext", "size_slack", "size_short"])
def test_an_index_that_dali_would_believe_is_refused(name, tmp_path):
    # The spoilt member must be one of those that are compared: keep its line and few others.
    good = Path("idx/plain_ustar.idx").read_text().splitlines()
    spoilt = Path(f"bad_idx/{name}.idx").read_text().splitlines()
    lines = [line for one, line in zip(good, spoilt, strict=True) if one != line]
    index = tmp_path / "x.idx"
    index.write_text("\n".join([f"v1.2 {len(lines)}", *lines, ""]))
    with pytest.raises(CorruptFileError, match=r"x.idx \(line 2\) puts .*: dataload index tars/plain_ustar.tar"):
        len(TarSource("tars/plain_ustar.tar", index=index))


def test_golden_files_are_those_of_the_manifest():
    listed = {**MANIFEST["tars"], **MANIFEST["idx"]}
    assert {path: sha(Path(path).read_bytes()) for path in listed} == {
        path: info["sha256"] for path, info in listed.items()
    }
