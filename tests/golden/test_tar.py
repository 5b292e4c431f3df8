"""Archives and indexes of the original tools, and what the original readers made of them: see tar/README.md."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from dataload.errors import ConfigError, CorruptFileError, DataloadError, SourceError
from dataload.sources.tar.header import scan
from dataload.sources.tar.index import parse_index
from dataload.sources.tar.reader import TarSource
from dataload.sources.tar.writer import write_index

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
        assert [key for key, _ in found] == [
            "README",
            "000000",
            "LICENSE",
            "000001",
            "dir/Makefile",
            "dir/000000",
            "000002",
        ]
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


@pytest.mark.filterwarnings("ignore:tars/no_eof.tar ends without blocks of zeros:UserWarning")
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
            assert [record.keys() - other.keys() for record, other in zip(scanned, indexed, strict=True)] == [
                {"jpg"},
                set(),
            ]
        elif name == "noext":
            assert len(indexed) == 8
        else:
            assert indexed == scanned[: len(indexed)]
            assert len(indexed) == (4 if name == "mid_zero1" else len(scanned))


LEGAL = ("three_fields_v12",)  # as DALI's documentation shows it, not as DALI reads it


def one_pass(case: dict[str, Any]) -> list[list[tuple[str, str]]]:
    """What DALI reads in one epoch: for each sample, hash and source of each output."""
    if "int_batches" in case:
        values = [value for batch in case["int_batches"] for value in batch]
        return [[(sha(value.to_bytes(4, "little", signed=True)), "")] for value in values[: case["epoch_size"]]]
    samples = [
        [
            (ORACLE["values"][value[row]][0], ORACLE["sources"][source[row]])
            for value, source in zip(batch, sources, strict=True)
        ]
        for batch, sources in zip(case["batches"], case["sources"], strict=True)
        for row in range(len(batch[0]))
    ]
    return samples[: case["epoch_size"]]


def is_a_plain_pass(case: dict[str, Any]) -> bool:
    args = case["args"]
    odd = ("random_shuffle", "shuffle_after_epoch")
    return not any(args.get(name) for name in odd) and args.get("num_shards", 1) == 1


def open_case(args: dict[str, Any], **options: Any) -> TarSource:
    return TarSource(
        args["paths"],
        index=args.get("index_paths") or False,
        case_sensitive=args.get("case_sensitive_extensions", True),
        verify_index=False,  # DALI believes the index
        **options,
    )


EXACT = [c for c in ORACLE["cases"] if c["match"] == "exact" and c["result"] == "ok" and is_a_plain_pass(c)]


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case["id"])
def test_samples_and_bytes_are_those_of_dali(case):
    args = case["args"]
    folds = args.get("case_sensitive_extensions", True) is False
    wanted = [args["ext"]] if isinstance(args["ext"], str) else args["ext"]
    wanted = [set((name.lower() if folds else name).split(";")) for name in wanted]
    missing = args.get("missing_component_behavior", "").lower()
    samples: list[list[str]] = []
    for record in open_case(args):
        outputs = [next((v for n, v in record.items() if n in names and n != "__key__"), None) for names in wanted]
        assert missing != "error" or None not in outputs
        if missing != "skip" or None not in outputs:
            samples.append([sha(value or b"") for value in outputs])
    expected = one_pass(case)
    assert len(samples) == case["epoch_size"]
    assert samples[: len(expected)] == [[value for value, _ in sample] for sample in expected]


PLAIN_FIELDS = [
    c for c in EXACT if isinstance(c["args"]["ext"], list) and all(n.isidentifier() for n in c["args"]["ext"])
]


@pytest.mark.parametrize("case", PLAIN_FIELDS, ids=lambda case: case["id"])
def test_fields_and_missing_are_those_of_dali(case):
    args = case["args"]
    folds = args.get("case_sensitive_extensions", True) is False
    missing = args.get("missing_component_behavior", "").lower() or "empty"
    everything = {name for record in open_case(args) for name in record}
    if any((name.lower() if folds else name) not in everything for name in args["ext"]):
        # A field that no sample has: DALI cannot tell it from one that is missing everywhere.
        with pytest.raises(ConfigError, match="has no field"):
            len(open_case(args, fields=args["ext"], missing=missing))
        return
    source = open_case(args, fields=args["ext"], missing=missing)
    batch = source.read_batch(range(len(source)))
    expected = one_pass(case)
    for place, name in enumerate(args["ext"]):
        column = [sha(value) for value in batch[name.lower() if folds else name]]
        assert column == [sample[place][0] for sample in expected]


NOT_ABOUT_READING = ("dtype-", "shard", "ext-empty-list", "multi-with")
ERRORS = [
    case
    for case in ORACLE["cases"]
    if case["match"] in ("error", "safe_error")
    and case["group"] in ("read", "args", "badidx")
    and not any(word in case["id"] for word in (*NOT_ABOUT_READING, *LEGAL))
]


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case["id"])
def test_what_dali_refuses_or_dies_of_is_an_error_at_open(case):
    args = case["args"]
    fields = args["ext"] if isinstance(args["ext"], list) else [args["ext"]]
    behaviour = args.get("missing_component_behavior") or "empty"
    with pytest.raises(DataloadError) as caught:
        len(open_case(args, fields=fields, missing=behaviour))
    if case["group"] == "badidx":
        index = args["index_paths"][0]
        assert isinstance(caught.value, CorruptFileError)
        assert index in str(caught.value)
        assert "line " in str(caught.value)
        assert "dataload index" in str(caught.value)
    assert isinstance(caught.value, ConfigError | SourceError)


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
