import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from made_files import image, npy, pack
from refusals import refuses

from dataload import Loader
from dataload.errors import ConfigError, CorruptFileError, SourceError, SourceNotFoundError, UnsupportedFormatError
from dataload.sources.tar.reader import TarSource
from dataload.sources.tar.writer import TarWriter, write_index
from dataload.types import BytesColumn, FieldSpec


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "x.tar"


@pytest.fixture(params=[False, True], ids=["scanned", "indexed"])
def made(path, request):
    """Packs files, with or without an index."""

    def made(files):
        pack(path, files)
        if request.param:
            write_index(path, strict=False)
        return path

    return made


@pytest.fixture
def ragged(made) -> Path:
    return made({"a.jpg": b"1", "a.cls": b"2", "b.cls": b"3", "c.jpg": b"4", "c.txt": b"5"})


def test_missing_may_be_skipped_or_empty(ragged):
    source = TarSource(ragged, fields=["__key__", "jpg"], missing="skip")
    assert source.read(range(len(source))) == [{"__key__": "a", "jpg": b"1"}, {"__key__": "c", "jpg": b"4"}]
    for fields, count in ((["jpg", "cls"], 1), (["txt", "cls"], 0), (None, 3)):
        assert len(TarSource(ragged, fields=fields, missing="skip")) == count
    empty = TarSource(ragged, fields=["cls", "txt"], missing="empty")
    assert empty.read_batch(range(3)) == {"cls": [b"2", b"3", b""], "txt": [b"", b"", b"5"]}
    text = TarSource(ragged, fields=["txt"], missing="empty", decode="auto")
    assert text.read_batch(range(3)) == {"txt": ["", "", "5"]}
    pack(ragged, {"a.jpg": simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8)), "b.txt": b""})
    image = TarSource(ragged, fields=["jpg"], missing="empty", decode="auto", index=False)
    assert [record["jpg"].shape for record in image] == [(8, 8, 3), (0, 0, 3)]
    assert image.read_batch([1])["jpg"].shape == (1, 0, 0, 3)


def test_of_two_files_of_one_name_the_first_is_read_with_a_warning(path):
    for others in ([], [("0.txt", b"0")]):  # samples alike, or not
        pack(path, [*others, ("a.cls", b"1"), ("a.cls", b"2")])
        with pytest.warns(UserWarning, match=r"x\.tar: a sample has several files for the field 'cls': the first one"):
            assert TarSource(path)[-1] == {"__key__": "a", "cls": b"1"}


NO_CLS = "sample 2 \\('c'\\) has no field 'cls'"


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"fields": ["jgp"]}, None, r"x.tar has no field 'jgp': did you mean 'jpg'\? Choose from __key__, cls, jpg"),
        *(({"fields": ["jgp"], "missing": missing}, None, "has no field 'jgp'") for missing in ("skip", "empty")),
        ({}, ["jgp"], "has no field 'jgp'"),
        ({"fields": ["cls"]}, None, f"{NO_CLS}: .*missing='skip'.*missing='empty'"),
        ({"fields": ["cls"], "missing": "empty", "decode": "auto"}, None, f"{NO_CLS}, and values decoded as cls have"),
        ({}, ["cls"], f"x.tar: {NO_CLS}: choose missing='skip' to leave such samples out"),
        ({}, None, "different fields"),
        ({"decode": "auto", "fields": ["x.npy"]}, None, "no field 'x.npy': choose from __key__, cls, jpg, txt"),
        ({"decode": {"jpg": "imag"}}, None, r"decode\['jpg'\] is 'imag': did you mean 'image'"),
        ({"decode": "pil"}, None, "decode must be 'auto', 'written', a mapping or None; got 'pil'"),
        ({"index": True}, None, "index must be text, a path, a list, False or None; got True"),
        ({"index": ["a.idx", "b.idx"]}, None, "index names 2 files for 1 archives: pass one for each"),
    ],
)
def test_settings_that_do_not_fit(ragged, options, fields, message):
    with pytest.raises(ConfigError, match=message):
        TarSource(ragged, **options).read_batch([0, 2], fields)
    with pytest.raises(ConfigError, match=r"x.tar is in paths twice, with two indexes: a.idx, b.idx"):
        TarSource([ragged, ragged], index=["a.idx", "b.idx"])


def test_shards_that_differ(tmp_path):
    one = pack(tmp_path / "1.tar", {"a.jpg": b"1", "a.cls": b"1"})
    two = pack(tmp_path / "2.tar", {"b.txt": b"2"})
    source = TarSource([one, two])
    assert list(source.fields) == ["__key__", "jpg", "cls", "txt"]
    assert source.shard_lengths == (1, 1)
    assert source.read_batch([1], ["txt"]) == {"txt": [b"2"]}
    empty = TarSource([one, two], fields=["jpg", "txt"], missing="empty")
    assert empty.read_batch([1, 0]) == {"jpg": [b"", b"1"], "txt": [b"2", b""]}
    assert TarSource([one, two], fields=["txt"], missing="skip").shard_lengths == (0, 1)
    with pytest.raises(ConfigError, match=r"2.tar has no field 'jpg'"):
        len(TarSource([one, two], fields=["jpg"]))
    with pytest.raises(ConfigError, match=r"2.tar: sample 0 \('b'\) has no field 'jpg'"):
        source.read_batch([1], ["jpg"])
    three = pack(tmp_path / "3.tar", {"c.txt": b"3", "d.jpg": b"4"})
    with pytest.raises(ConfigError, match="rows 0 and 2 have different fields"):  # of the batch, not of an archive
        TarSource([two, three]).read_batch([0, 1, 2])


@pytest.mark.filterwarnings("ignore:.* several files for the field 'jpg'")
def test_case(path, tmp_path):
    pack(path, {"a.JPG": b"1", "a.jpg": b"2", "b.Jpg": b"3", "b.CLS": b"4"})
    folded = TarSource(path, case_sensitive=False)
    assert list(folded) == [{"__key__": "a", "jpg": b"1"}, {"__key__": "b", "jpg": b"3", "cls": b"4"}]
    assert TarSource(path, case_sensitive=False, fields=["JPG"]).read_batch([1, 0]) == {"jpg": [b"3", b"1"]}
    assert TarSource(path)[0] == {"__key__": "a", "JPG": b"1", "jpg": b"2"}
    assert TarSource(path, case_sensitive=False, decode={"CLS": "cls"})[1]["cls"] == 4
    long = pack(tmp_path / "long.tar", {"a.cls": b"1", "b.cls": b"2", "c.cls": b"1" + b"0" * 18})
    assert TarSource(long, decode="auto").read_batch(range(3))["cls"].tolist() == [1, 2, 10**18]


class TestIndex:
    def test_the_one_beside_the_archive_is_used(self, path):
        pack(path, {"a.x": b"1", "b.x": b"2"})
        index = path.with_suffix(".idx")
        index.write_text("v1.2 1\nx 1536 1 b.x\n")
        assert TarSource(path)[0] == {"__key__": "b", "x": b"2"}
        assert len(TarSource(path, index=False)) == 2
        other = path.with_name("other")
        index.rename(other)
        assert len(TarSource(path)) == 2
        assert len(TarSource(path, index=other)) == len(TarSource([path], index=[str(other)])) == 1

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("x 512 9 a.x", "puts 9 bytes at 512, but the header says 1"),
            ("x 1024 1 a.x", "puts a member at 1024, but there is no header before it"),
            ("x 0 1 a.x", "puts a member at 0, where the first header is"),
            ("x 512 1 b.x", "puts 'b.x' at 512, but the header says 'a.x'"),
            ("y 512 1 a.x", "puts 'a.y' at 512, but the header says 'a.x'"),
            ("x 512 99999999 a.x", "puts 99999999 bytes at 512, but the archive has 10240"),
            ("x 5120000 1 a.x", "puts 1 bytes at 5120000, but the archive has 10240"),
            ("x 1536 0 d.x", "puts a file at 1536, but the header before it is not of a file"),
        ],
    )
    def test_one_that_disagrees(self, path, line, message):
        with tarfile.open(pack(path, {"a.x": b"1"}), "a") as tar:
            info = tarfile.TarInfo("d.x")
            info.type = tarfile.DIRTYPE
            tar.addfile(info)
        path.with_suffix(".idx").write_text(f"v1.2 1\n{line}\n")
        where = rf"x.tar, byte \d+, record 0: the index .*x.idx \(line 2\) {message}: .*dataload index"
        with pytest.raises(CorruptFileError, match=where) as caught:
            len(TarSource(path))
        assert caught.value.offset == int(line.split()[1])

    def test_one_that_is_believed(self, path):
        pack(path, {"a.x": b"123", "b.x": b"456"})
        index = path.with_suffix(".idx")
        index.write_text("v1.2 1\ny 1536 2 c.y\n")
        assert TarSource(path, verify_index=False)[0] == {"__key__": "c", "y": b"45"}
        for text, message in (
            ("v1.2 1\ny 1536 20000 c.y\n", "puts 20000 bytes at 1536"),
            # its name would stand before the archive
            ("v1.1 1\njpg 0 10\n", "puts a file at 0, where the first header is, so it has no name"),
        ):
            index.write_text(text)
            with pytest.raises(CorruptFileError, match=message):
                TarSource(path, verify_index=False)[0]
        with pytest.raises(SourceNotFoundError):
            len(TarSource(path, index="a.idx"))
        index.write_text("v1.1 2\nx 1536 3\nx 512 3\n")
        batch = TarSource(path).read_batch([0, 1])
        assert batch == {"__key__": ["b", "a"], "x": [b"456", b"123"]}
        assert type(batch["x"]) is BytesColumn, "copied at once, also of one field"


class TestDecode:
    def test_auto(self, path):
        rng = np.random.default_rng(0)
        jpeg = simplejpeg.encode_jpeg(rng.integers(0, 256, (8, 9, 3), np.uint8))
        files = {
            "a.jpg": jpeg, "a.cls": b"7", "a.caption.txt": b"hi", "a.x.npy": npy(np.arange(3)), "a.json": b"[1]",
            "a.mp4": b"m", "a.score.json": b"0.5",
        }  # fmt: skip
        source = TarSource(pack(path, files), decode="auto")
        record = source[0]
        assert list(record) == ["__key__", "jpg", "cls", "caption", "x", "json", "mp4", "score"]
        np.testing.assert_array_equal(record["jpg"], simplejpeg.decode_jpeg(jpeg))
        assert record["x"].tolist() == [0, 1, 2]
        assert [record[name] for name in ("cls", "caption", "json", "mp4", "score")] == [7, "hi", [1], b"m", 0.5]
        assert {name: str(spec) for name, spec in source.fields.items()} == {
            "__key__": "str ()", "jpg": "uint8 (?, ?, 3)", "cls": "int64 ()", "caption": "str ()", "x": "int64 (3)",
            "json": "unknown", "mp4": "bytes ()", "score": "float64 ()",
        }  # fmt: skip
        assert list(TarSource(path, decode="auto", fields=["x", "caption"])[0]) == ["x", "caption"]
        with pytest.raises(ConfigError, match=r"no field 'x.npy': choose from __key__, caption"):
            len(TarSource(path, decode="auto", fields=["x.npy"]))

    def test_by_extension(self, path):
        def cls(data):
            return data.decode()

        cls.__qualname__ = "cls"
        pack(path, {"a.cls": b"7", "a.left.raw": b"ab", "a.right.raw": b"cd", "a.txt": b"x"})
        source = TarSource(path, decode={"cls": "cls", "raw": lambda data: data.hex(), "left.raw": len})
        assert source[0] == {"__key__": "a", "cls": 7, "left.raw": 2, "right.raw": "6364", "txt": b"x"}
        assert source.fields["left.raw"] == FieldSpec("unknown")
        own = TarSource(path, decode={"cls": cls})  # a function with the name of a decoder
        assert (own.fields["cls"], own.read_batch([0])["cls"]) == (FieldSpec("unknown"), ["7"])

    @pytest.mark.parametrize("other", [{}, {"c.y": b"2"}], ids=["alike", "ragged"])
    def test_a_payload_that_does_not_decode(self, path, other):
        pack(path, {"a.x.cls": b"1", "b.x.cls": b"one", **other})
        source = TarSource(path, decode="auto")
        message = r"x.tar, byte 1536, record 1: field 'x' of 'b': expected a number .* b'one'"
        refuses(source, [0, 1], message, path=str(path), offset=1536, index=1)
        with pytest.raises(CorruptFileError, match=message):
            source.read_batch([0, 1], ["x"])
        pack(path, {"a.x.cls": b"1", "b.x.json": b"{", "c.tiff": image(np.zeros((2, 2), np.float32), "tiff")})
        with pytest.raises(CorruptFileError, match=r"byte 1536, record 1: field 'x' of 'b': invalid JSON"):
            TarSource(path, decode="auto").read([0, 1])
        with pytest.raises(UnsupportedFormatError, match="field 'tiff' of 'c': a TIFF image of mode 'F'"):
            TarSource(path, decode="auto").read([2])

    def test_a_record_that_a_function_of_c_refuses_is_a_bad_record(self, path):
        source = TarSource(pack(path, {"a.x": b"1", "b.x": b"one", "c.x": b"3"}), decode={"x": float}, fields=["x"])
        with Loader(source, batch_size=1, on_error="skip", epochs=1) as loader:
            assert [batch["x"].tolist() for batch in loader] == [[1], [], [3]]
            assert loader.statistics().bad == 1

    def test_arrays_of_other_shapes(self, path):
        pack(path, {f"{i}.npy": npy(np.arange(i)) for i in range(4)})
        source = TarSource(path, decode="auto")
        assert [record["npy"].tolist() for record in source] == [list(range(i)) for i in range(4)]
        assert source.fields["npy"] == FieldSpec("int64", (None,))
        pack(path, {f"{n}.npy": npy(np.arange(6).reshape(n, -1)) for n in (2, 3)})  # of equal size
        with pytest.raises(ConfigError, match=r"row 0 is int64 \(2, 3\), row 1 is int64 \(3, 2\)"):
            TarSource(path, decode="auto").read_batch([0, 1])

    @pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", npy(np.arange(3))[:-1]])
    def test_damaged_arrays(self, path, damage):
        pack(path, {"a.npy": damage, "b.npy": damage})
        source = TarSource(path, decode="auto")
        assert source.fields["npy"] == FieldSpec("unknown")
        with pytest.raises(CorruptFileError, match=r"byte 512, record 0: field 'npy' of 'a': a .npy file"):
            source.read_batch([0, 1])


def test_damage_may_end_an_archive(path):
    pack(path, {"a.x": b"1", "b.x": b"2"})
    data = bytearray(path.read_bytes())
    data[1024] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match=r"x.tar, byte 1024: expected a tar header here"):
        len(TarSource(path))
    with pytest.warns(UserWarning, match="reading ends here, after 1 members"):
        assert len(TarSource(path, on_damage="stop")) == 1
    path.write_bytes(data[1024:])  # nothing was read: it is no archive
    with pytest.raises(CorruptFileError):
        len(TarSource(path, on_damage="stop"))


def write(path: Path, *records, **options) -> Path:
    with TarWriter(path, **options) as writer:
        writer.extend(records)
    return path


def listing(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(info.name, tar.extractfile(info).read()) for info in tar.getmembers()]


@pytest.mark.timeout(90)  # it imports torch, which takes long on a busy machine
def test_webdataset_reads_it(path):
    import webdataset as wds

    write(path, *({"__key__": f"d/{key}", "cls": 3, "npy": np.arange(3)} for key in "ab"))
    with path.open("rb") as stream:
        files = wds.tariterators.tar_file_expander([{"url": "x", "stream": stream}])
        samples = list(wds.tariterators.group_by_keys(files))
    assert [(sample["__key__"], sample["cls"]) for sample in samples] == [("d/a", b"3"), ("d/b", b"3")]
    assert np.load(io.BytesIO(samples[1]["npy"])).tolist() == [0, 1, 2]


LAST_PART = "cannot be the key of a sample: its last part"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        *(({"__key__": key, "x": b""}, LAST_PART) for key in ("a.b", "d/a.b", "", "d/", ".a", "a\0", "d/.hidden")),
        ({"__key__": 7, "x": b""}, r"the key of a sample must be text, got 7 \(int\)"),
        ({"__key__": "a b", "x": b""}, "the key 'a b' contains white space, which DALI's index .*index=False"),
        ({"__key__": "\ud800", "x": b""}, r"the key '.*' is not valid text: surrogates not allowed"),
        ({"__key__": "0", "x": b""}, "record 1 has the key of the one before, '0': both are one sample"),
        ({}, "record 1 has no fields: a sample without files cannot be stored"),
        ({"__key__": "a"}, "record 1 has no fields"),
        (b"abc", "format 'tar' stores fields, got a record of type bytes"),
        ({7: b""}, "field names must be text, got 7"),
        ({"": b""}, "field '' cannot be part of a file name"),
        ({"a/b": b""}, "field 'a/b' cannot be part of a file name"),
        ({"a b": 1}, "the name of field 'a b' contains white space"),
        ({"x": None}, "field 'x' is of type NoneType, which tar"),
        ({"x": np.zeros(2, "V2")}, r"field 'x' cannot be stored as npy: an array of dtype '\|V2': not a plain dtype"),
        ({"x": np.arange(2), "x.npy": b""}, r"field 'x.npy' and another one would both be stored as 'x.npy'"),
    ],
)
def test_records_that_cannot_be_stored_leave_the_file_as_it_was(path, record, message):
    with TarWriter(path) as writer:
        writer.write({"__key__": "0", "x": b"1"})
        with pytest.raises(ConfigError, match=message):
            writer.write(record)
        writer.write({"x": b"2"})
        assert len(writer) == 2
    assert listing(path) == [("0.x", b"1"), ("00000001.x", b"2")]


def test_white_space_without_an_index(path):
    write(path, {"__key__": "a b", "my field": b"x"}, index=False)
    assert not path.with_suffix(".idx").exists()
    assert TarSource(path)[0] == {"__key__": "a b", "my field": b"x"}


@pytest.mark.parametrize("name", ["x.tar", "x.idx"])
def test_what_exists_is_not_replaced_unless_that_is_said(path, tmp_path, name):
    (tmp_path / name).write_bytes(b"old")
    with pytest.raises(ConfigError, match=rf"{name} exists: .*overwrite=True"):
        TarWriter(path)
    assert (tmp_path / name).read_bytes() == b"old"
    assert os.listdir(tmp_path) == [name]
    write(path, {"x": b"1"}, overwrite=True)
    assert TarSource(path)[0]["x"] == b"1"


def test_an_old_index_never_stands_beside_a_new_archive(path):
    write(path, {"x": b"1"}, {"x": b"2"})
    write(path, {"x": b"3"}, overwrite=True, index=False)
    assert not path.with_suffix(".idx").exists()
    assert len(TarSource(path)) == 1
    write(path, overwrite=True)
    assert not path.with_suffix(".idx").exists()


def test_an_index_that_appears_meanwhile(path):
    writer = TarWriter(path)
    writer.write({"x": b"1"})
    path.with_suffix(".idx").write_bytes(b"another's")
    with pytest.raises(ConfigError):
        writer.close()
    assert path.with_suffix(".idx").read_bytes() == b"another's"


def test_keys_by_function(path):
    write(path, {"x": b"1"}, {"x": b"2"}, key=lambda i, record: f"{record['x'].decode()}-{i}")
    assert listing(path) == [("1-0.x", b"1"), ("2-1.x", b"2")]


class TestWriteIndex:
    @pytest.mark.parametrize(
        ("names", "error", "message"),
        [
            (("a.x", "b.x", "a.y"), CorruptFileError, "x.tar, byte 1024: sample 'a' continues here after others"),
            (("a.x", "a.y", "a.x"), CorruptFileError, "x.tar, byte 1024: a second 'a.x' in one sample"),
            (("a.b\tc",), ConfigError, "has white space in its name"),
            (("a b.x",), ConfigError, r"x.tar: member 'a b.x' \(data at byte 512\) has white space in its name"),
            (("a.",), ConfigError, r"x.tar: member 'a.' \(data at byte 512\) has no extension"),
        ],
    )
    def test_archives_that_lose_something(self, path, names, error, message):
        pack(path, [(name, b"") for name in names])
        path.with_suffix(".idx").write_text("old")
        with pytest.raises(error, match=message):
            write_index(path)
        assert path.with_suffix(".idx").read_text() == "old"
        assert len(os.listdir(path.parent)) == 2


def test_an_index_that_cannot_be_written_leaves_the_old_archive(path, tmp_path, monkeypatch):
    write(path, {"txt": b"old"})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    writer = TarWriter(path, overwrite=True)
    writer.write({"txt": b"new"})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dataload.sources.tar.writer.build_head", full)
    with pytest.raises(SourceError, match=r"cannot write .*x\.tar: No space left on device"):
        writer.close()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
