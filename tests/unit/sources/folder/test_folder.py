"""Folders of images and audio: classes as torchvision's, rows of a CSV file, patterns, and what is wrong with them."""

import json
import os
import pickle
import shutil

import numpy as np
import PIL.Image
import pytest
import soundfile
from command_line import fail, ok, run
from made_files import clip, image
from refusals import refuses

import dataload
from dataload._util.caches import pickling_for_worker
from dataload.convert import convert
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError, UnsupportedFormatError
from dataload.sources.folder.reader import FolderSource
from dataload.types import FieldSpec


def pixels(path):
    return np.array(PIL.Image.open(path).convert("RGB"))


def fill(root, names):
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        suffix = name.rpartition(".")[2].lower()
        kinds = {"jpg": "JPEG", "png": "PNG"}
        content = image(number, kinds[suffix]) if suffix in kinds else name.encode()
        path.write_bytes(clip() if suffix == "wav" else content)
    return root


NAMES = ["cat/a.png", "cat/b.c.JPG", "cat-2/a.png", "cat/x/1.png", "cat/x-y/0.png", "cat/x/y/0.png", "Ant/z.png"]


def torchvision_samples(root):
    """What torchvision.datasets.ImageFolder finds, by its rules and with os.walk."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    found = []
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(root / name, followlinks=True)):
            shown = [file for file in sorted(files) if file[0] != "." and file.lower().endswith((".jpg", ".png"))]
            found += [(os.path.join(folder, file), label) for file in shown]
    return classes, found


def test_classes_and_order_are_those_of_torchvision(tmp_path):
    others = ["cat/notes.txt", "cat/.hidden.png", ".git/cat/a.png", "README.md", "top.png"]
    root = fill(tmp_path / "img", [*NAMES, *others])
    os.symlink(root / "Ant", root / "cat" / "linked")
    classes, samples = torchvision_samples(root)
    with dataload.open(root) as source:
        assert source.fields == {
            "__key__": FieldSpec("str", ()),
            "image": FieldSpec("uint8", (None, None, 3)),
            "label": FieldSpec("int64", (), tuple(classes)),
        }
        assert str(source.fields["label"]) == "int64 (), 3 classes"
        assert str(dataload.windows(source, [8], 2).fields["label"]) == "int64 (2), 3 classes"
        assert len(source) == len(samples) == 8
        for record, (path, label) in zip(source, samples, strict=True):
            assert record["__key__"] == os.path.splitext(os.path.relpath(path, root))[0]
            assert record["label"] == label
            np.testing.assert_array_equal(record["image"], pixels(path))
        batch = source.read_batch([5, 0, 5])
        np.testing.assert_array_equal(batch["image"], [pixels(samples[i][0]) for i in (5, 0, 5)])
        assert (batch["label"].dtype, batch["label"].tolist()) == (np.int64, [samples[i][1] for i in (5, 0, 5)])
        assert source.locate(0)[:3] == (str(root), 0, "Ant/z")


def test_audio(tmp_path):
    root = fill(tmp_path / "clips", ["no/a.wav", "yes/b.wav"])
    (root / "yes" / "c.flac").write_bytes(clip(30, 16_000, "FLAC"))
    with dataload.open(root) as source:
        assert list(source.fields) == ["__key__", "audio", "sample_rate", "label"]
        assert str(source.fields["audio"]) == "float32 (?, ?)"
        found = source.read([2, 0])
        wanted, rate = soundfile.read(root / "yes" / "c.flac", dtype="float32", always_2d=True)
        np.testing.assert_array_equal(found[0].pop("audio"), wanted)
        assert found[0] == {"__key__": "yes/c", "sample_rate": rate, "label": 1}
        assert source.read_batch([1, 0], ["sample_rate"])["sample_rate"].tolist() == [8_000, 8_000]
        with pytest.raises(ConfigError, match="field 'audio'"):
            source.read_batch([0, 2])
    with dataload.open(root, decode={}) as source:
        assert source[0] == {"__key__": "no/a", "audio": clip(), "label": 0}


def test_other_decoders(tmp_path):
    root = fill(tmp_path / "img", ["cat/a.png", "dog/b.jpg"])
    jpeg = image(1, "JPEG")
    with dataload.open(root, decode={"PNG": len}) as source:
        assert [record["image"] for record in source] == [len(image(0)), jpeg]
        assert source.fields["image"] == FieldSpec("unknown")
    with dataload.open(root, decode={"png": "image"}) as source:
        assert [type(record["image"]) for record in source] == [np.ndarray, bytes]
        assert source.fields["image"] == FieldSpec("unknown")
    pairs = fill(tmp_path / "pairs", ["a.png", "a.seg.png"])
    for suffix, image_is in (("png", len(image(0))), ("seg.png", image(0))):  # one for all PNG, or for masks only
        with dataload.open(f"{pairs}/{{key}}.*", decode={suffix: len}) as source:
            assert source[0] == {"__key__": "a", "image": image_is, "seg": len(image(1))}
    with dataload.open(root, decode=None) as source:
        assert source[0] == {"__key__": "cat/a", "image.png": image(0), "label": 0}
        assert source.read([1]) == [source[1]] == [{"__key__": "dog/b", "image.jpg": jpeg, "label": 1}]
        with pytest.raises(ConfigError, match=r"a record has no field 'image\.png'"):
            source.read_batch([0, 1], ["image.png"])
    with dataload.open(root, decode={"png": lambda data: 1 / 0}) as source:
        refuses(source, [0], "zero", ZeroDivisionError, __notes__=[f"while decoding {root}/cat/a.png"])


def test_rows_of_a_csv_file(tmp_path):
    root = fill(tmp_path / "img", ["b.png", "x/a.png", "c.png"])
    labels = tmp_path / "train.csv"
    labels.write_text("label,filename,score,age,code\ndog,./c.png,1.5,3,01\ncat,b.png,2,-4,02\ndog,x/a.png,nan,5,03\n")
    with dataload.open(root, labels=labels) as source:
        assert source.fields["label"] == FieldSpec("int64", (), ("cat", "dog"))
        rows = [(r["__key__"], r["label"], r["age"], r["code"]) for r in source]
        assert rows == [("b", 0, -4, "02"), ("c", 1, 3, "01"), ("x/a", 1, 5, "03")]
        np.testing.assert_array_equal(source.read_batch([0, 1, 2])["score"], [2, 1.5, np.nan])
        before = source.fingerprint()
    labels.write_text(f"file,label,id,far\nb.png,7,{2**63 - 1},1\nc.png,8,{-(2**63)},{2**63}\n")
    with dataload.open(root, labels=labels, missing="skip") as source:
        assert [(r["id"], r["far"]) for r in source] == [(2**63 - 1, "1"), (-(2**63), f"{2**63}")]
        assert source.fields["label"] == FieldSpec("int64", ())
        assert source.read_batch([0, 1], ["label"])["label"].tolist() == [7, 8]
        np.testing.assert_array_equal(source[1]["image"], pixels(root / "c.png"))
        assert source.fingerprint() != before
    labels.write_text("file,label\nb.png,7\nc.png,\nx/a.png,8\n")
    unnamed = pytest.warns(UserWarning, match="rows without a label are the class '', number 0")
    with (
        unnamed,
        pytest.warns(UserWarning, match=r"train\.csv: 'label' is read as text, because '' among numbers is no"),
    ):
        assert dataload.open(root, labels=labels).fields["label"].classes == ("", "7", "8")


NO_ROW = r"has no row for 'b.png' \(1 of 2 files have none\): pass missing="
AMBIGUOUS = r"img has both images or audio \(2: cat/a\.png, dog/c\.png\) and files of other formats"
MEANT = r"say what you mean: format='folder' for the images alone, {}or a pattern such as '.*/img/({})' for the files$"
CLASSES = ["cat/a.png", "dog/c.png"]
META = "metadata.jsonl"
WRONG = [  # files and their content, options, error, message
    (["a.png"], {"labels": ""}, CorruptFileError, "the file is empty, and must begin with the names of columns"),
    (["a.png"], {"labels": "name,label\n"}, ConfigError, "called .*, but the columns are 'name', 'label'"),
    (["a.png"], {"labels": "file,image\na.png,1\n"}, ConfigError, "a column cannot be called 'image': rename it"),
    (["a.png"], {"labels": "file,x,x\na.png,1,2\n"}, ConfigError, "a column cannot be called 'x': rename it"),
    (["a.png"], {"labels": "file,x\na.png\n"}, CorruptFileError, "line 2 has 1 cells, and the first has 2"),
    (["a.png"], {"labels": "file\na.png\na.png\n"}, CorruptFileError, "line 3: 'a.png' has two rows, the first at lin"),
    (["a.png"], {"labels": "file\nz\na.png\ny\n"}, CorruptFileError, r"line 2 \(and 1 more\): there is no file 'z'"),
    (["a.png"], {"labels": 'file,x\n"a.png"b,1\n'}, CorruptFileError, r"labels\.csv.*line 2 is not CSV: "),
    (["a.png"], {"labels": b"file,x\n\xff,1\n"}, CorruptFileError, "it is not UTF-8: invalid start byte"),
    (["a.png", "b.png"], {"labels": "file\na.png\n"}, ConfigError, rf"labels\.csv {NO_ROW}"),
    ([], {"labels": "file\n"}, ConfigError, r"img contains no images or audio: pass pattern="),
    ({META: "{}"}, {}, ConfigError, "of files must be called 'file' or .*, but the columns are missing"),
    ({META: "[1]"}, {}, CorruptFileError, "line 1 must be an object with the fields of the first, if any"),
    ({META: "{"}, {}, CorruptFileError, "line 1 is not JSON: "),
    ({META: '{"file": "a.png", "x": 1}\n{}'}, {}, CorruptFileError, "line 2 .* the fields of the first, file, x"),
    ({"metadata.csv": "file\na.png\n", "b.png": ""}, {}, ConfigError, NO_ROW),
    ({"metadata.csv": "file\na.png\n", META: '{"file": "a.png"}'}, {}, CorruptFileError, "line 1: 'a.png' has two row"),
    (
        {"metadata.csv": "file,x\na.png,1\n", "in/b.png": "", "in/metadata.csv": "file,y\nb.png,2\n"}, {},
        ConfigError, "in/metadata.csv has the columns y, and .*img/metadata.csv x: give all the same columns",
    ),
    (CLASSES, {"pattern": "{label}/a.png"}, ConfigError, "'{label}/a.png' has no {key}, where the key of a record end"),
    (CLASSES, {"pattern": "{key}.gif"}, ConfigError, r"no file in .*img matches the pattern '{key}\.gif'"),
    (CLASSES, {"pattern": "{x}/{x}/{key}.png"}, ConfigError, "pattern .* is wrong: redefinition of group name"),
    (CLASSES, {"pattern": "{image}/{key}.png"}, ConfigError, "'image' is also the name of another field: choose anoth"),
    (["cat/a.1.png", "cat/a.1.jpg"], {"pattern": "{label}/{key}.*.*"}, ConfigError, "img: cat/a.1.jpg and cat/a.1.png"),
    (["a.x.png", "b.x.png", "a.json"], {"pattern": "{key}.*"}, ConfigError, "img: 'b' has no file for the field 'json"),
    ([], {"format": None}, SourceNotFoundError, "has no files with a suffix of a known format"),
    ([], {}, ConfigError, "img has no class folders of images or audio: pass labels='labels.csv', or p"),
    (["a.png"], {"format": None}, ConfigError, "img has a.png, but no class folders .*: pass labels="),
    (["cat/a.png", "cat/a.wav"], {}, ConfigError, "img has both images and audio, cat/a.wav and cat/a.png: choose one"),
    (["cat/a.png", "dog/b.txt", "emu/c.txt"], {}, SourceNotFoundError, r"the class folder .*img/dog \(and 1 more\) co"),
    (CLASSES, {"decode": {"png": "pngs"}}, ConfigError, r"decode\['png'\] is 'pngs'"),
    *(
        (
            [*CLASSES, *stray], {"format": None},
            ConfigError, rf"{AMBIGUOUS} \({shown}\): {MEANT.format(labels, pattern)}",
        )
        for stray, shown, labels, pattern in (
            (["x.tar"], r"1: x\.tar", "", r"x\.tar|\*\.tar"),
            (["cat/x.parquet", "cat/y.parquet"], r"2: cat/x\.parquet, cat/y\.parquet", "", r"cat/\*\.parquet"),
            ([f"t/{n}.jsonl.gz" for n in range(4)], r"4: t/0.*, t/1.*, t/2.*, \.\.\.", "", r"t/\*\.jsonl\.gz"),
            (["data.mdb"], r"1: data\.mdb", "", r"\*\.mdb"),
            (["x.csv"], r"1: x\.csv", r"labels='.*/img/x\.csv' to join its rows to them, ", r"\*\.csv"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("files", "options", "error", "message"), WRONG, ids=[row[3] for row in WRONG])
def test_what_does_not_fit(tmp_path, files, options, error, message):
    root = tmp_path / "img"
    root.mkdir()
    fill(root, ["a.png", *files] if isinstance(files, dict) else files)
    for name, text in files.items() if isinstance(files, dict) else ():
        if text:
            (root / name).write_text(text)
    if "labels" in options:
        text, options = options["labels"], {"labels": tmp_path / "labels.csv"}
        options["labels"].write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(error, match=message) as caught:
        dataload.open(root, **{"format": "folder", **options})
    if "format='folder' for the images" in message:
        assert caught.value.key == "paths"
        if not files[-1].startswith("t/"):
            assert len(dataload.open(root, format="folder")) == 2


def test_labels_go_with_one_folder(tmp_path):
    with pytest.raises(ConfigError, match="labels names the files of one folder or archive, without a pattern"):
        FolderSource(f"{tmp_path}/{{key}}.png", labels=tmp_path / "a.csv")


def test_patterns(tmp_path):
    names = ["train/cat/1.jpg", "train/dog/2.jpg", "val/cat/3.jpg", "val/cat/readme.txt"]
    root = fill(tmp_path / "data", names)
    with dataload.open(f"{root}/{{split}}/{{label}}/{{key}}.jpg") as source:
        assert source[1]["__key__"] == "train/dog/2"
        assert [(r["split"], r["label"]) for r in source] == [("train", 0), ("train", 1), ("val", 0)]
        assert source.fields["label"].classes == ("cat", "dog")
        assert source.fields["split"] == FieldSpec("str", ())
        assert "data/{split}/{label}/{key}.jpg" in repr(source)
        assert source.read_batch([2, 1])["split"] == ["val", "train"]
    with dataload.open(root, pattern="train/{label}/{key}.*") as source:
        assert len(source) == 2
    with dataload.open(root, pattern="**/{key}.{jpg,png}", fields=["image"]) as source:
        np.testing.assert_array_equal(source[2]["image"], pixels(root / names[2]))


def test_several_files_make_one_record(tmp_path):
    root = tmp_path / "data"
    fill(root, ["a.left.png", "b.left.png", "a.right.jpg", "b.right.png", "a.json", "b.json", "b/c.json"])
    (root / "a.json").write_text('{"x": [1]}')
    (root / "b.json").write_text("3")
    with dataload.open(root, pattern="{key}.*", format="folder") as source:
        assert {name: str(spec) for name, spec in source.fields.items()} == {
            "__key__": "str ()", "json": "unknown", "left": "uint8 (?, ?, 3)", "right": "uint8 (?, ?, 3)",
        }  # fmt: skip
        first, second = source
        assert (first["json"], second["json"]) == ({"x": [1]}, 3)
        batch = source.read_batch([0, 1], ["right", "left"])
        np.testing.assert_array_equal(batch["right"][0], pixels(root / "a.right.jpg"))
        np.testing.assert_array_equal(batch["left"][1], second["left"])
    with dataload.open(f"{root}/{{key}}.*", decode=None) as source:
        assert list(source[0]) == ["__key__", "json", "left.png", "right.jpg"]
    (root / "b.json").unlink()
    with dataload.open(f"{root}/{{key}}.*", missing="skip") as source:
        assert [record["__key__"] for record in source] == ["a"]
    with dataload.open(f"{root}/**/{{key}}.left.{{png,jpg}}") as source:
        assert list(source.fields) == ["__key__", "left"]


IMAGES = ["cat/a.png", "cat/b.png", "dog/c.png", "dog/d.png"]
SPLIT = [f"{split}/{name}" for split in ("train", "Val") for name in (*NAMES[2:], "dog/9.png")]


def test_text_and_descriptions_are_no_second_kind(tmp_path):
    root = fill(tmp_path / "img", [*IMAGES, "README.md", "LICENSE", "cat/a.txt", "cat/a.json", "info.json", ".x.csv"])
    with dataload.open(root) as source:
        assert (type(source), len(source)) == (FolderSource, 4)
    shards = tmp_path / "shards"
    shards.mkdir()
    with dataload.create(shards / "x.tar", shards=2) as writer:
        writer.extend({"cls": n} for n in range(4))
    fill(shards, ["preview/a.png"])
    with dataload.open(shards) as source:  # the manifest says which
        assert len(source) == 4


def test_metadata_beside_images_is_joined(tmp_path):
    root = fill(tmp_path / "img", ["a.png", "in/b.png"])
    (root / "metadata.csv").write_text("file_name,text,label\na.png,an a,x\nin/b.png,a b,y\n")
    with dataload.open(root) as source:
        assert [(r["__key__"], r["text"], r["label"]) for r in source] == [("a", "an a", 0), ("in/b", "a b", 1)]
        assert source.fields["label"].classes == ("x", "y")
        np.testing.assert_array_equal(source[0]["image"], pixels(root / "a.png"))
        before = source.fingerprint()
    (root / "metadata.csv").unlink()
    rows = {"n": 1, "f": 1.0, "b": True, "o": {"bbox": [[1, 2]]}}, {"f": 0.5, "n": 2, "b": False, "o": {"bbox": []}}
    rows[0]["g"], rows[1]["g"] = 2**70, 1
    rows[0]["t"], rows[1]["t"] = "a\u2028b\x85", "c"
    for name, row in zip(("a.png", "in/b.png"), rows, strict=True):
        line = json.dumps({"file_name": (root / name).name, **row}, ensure_ascii=False).replace("1.0", "1")
        (root / name).with_name("metadata.jsonl").write_text(f"{line}\n\n", "utf-8")
    with dataload.open(root) as source:
        assert [{name: record[name] for name in "nfbogt"} for record in source] == list(rows)
        assert [str(source.fields[name]) for name in "nfbo"] == ["int64 ()", "float64 ()", "bool ()", "unknown"]
        source[0]["o"]["bbox"].append(3)
        assert source[0]["o"] == {"bbox": [[1, 2]]}, "a record belongs to the caller"
        assert source.read_batch([1, 0], ["n"])["n"].tolist() == [2, 1]
        assert source.fingerprint() != before


@pytest.fixture(params=[False, True], ids=["folder", "zip"])
def packed(request):
    """Packs a folder, or leaves it as it is."""
    return lambda root: shutil.make_archive(str(root), "zip", root.parent, root.name) if request.param else root


def test_splits_are_no_classes(tmp_path, packed):
    root = fill(tmp_path / "data", SPLIT)
    path = packed(root)
    opens = "" if path != root else r"open one of them, dataload\.open\('.*/data/train'\), or "
    message = rf"has the folders Val, train, which are names of splits, not of classes: {opens}pass split='train'; if "
    with pytest.raises(ConfigError, match=message + "they are classes, pass split=None$") as refused:
        dataload.open(path)
    assert refused.value.key == "split"
    with dataload.open(path, split="train") as source, dataload.open(root / "train") as alone:
        assert source.fields["label"] == alone.fields["label"]
        assert [record["__key__"] for record in source] == [f"train/{record['__key__']}" for record in alone]
        assert source.read_batch([0, 4])["label"].tolist() == alone.read_batch([0, 4])["label"].tolist()
        np.testing.assert_array_equal(source[3]["image"], alone[3]["image"])
    for folder, options, classes in (
        (path, {"split": None}, ("Val", "train")),
        (fill(tmp_path / "a", ["train/a.png", "bus/b.png"]), {}, ("bus", "train")),  # one name that is none of a split
        (fill(tmp_path / "b", ["test/a.png"]), {}, ("test",)),
    ):
        with dataload.open(folder, **options) as source:
            assert source.fields["label"].classes == classes
    with pytest.raises(ConfigError, match=r"has no folder of the split 'val': did you mean 'Val'\? Choose"):
        dataload.open(path, split="val")


def test_splits_with_metadata(tmp_path, packed):
    root = fill(tmp_path / "data", ["train/a.png", "test/b.png"])
    (root / "metadata.csv").write_text("file_name,x\ntrain/a.png,1\ntest/b.png,2\n")
    path = packed(root)
    with pytest.raises(ConfigError) as refused:
        dataload.open(path)
    assert refused.value.key == "split"
    for split, expected in (("train", [1]), ("test", [2]), (None, [2, 1])):
        with dataload.open(path, split=split) as source:
            assert [record["x"] for record in source] == expected
    (root / "metadata.csv").unlink()
    for file in root.glob("*/*.png"):
        file.with_name("metadata.jsonl").write_text(json.dumps({"file_name": file.name, "x": file.parent.name}))
    with dataload.open(packed(root), split="test") as source:
        assert [record["x"] for record in source] == ["test"]


def test_several_folders_have_the_classes_of_all(tmp_path):
    fill(tmp_path / "a", ["cat/1.png", "emu/2.png"])
    fill(tmp_path / "b", ["ant/3.png", "emu/4.png"])
    with dataload.open([tmp_path / "a", tmp_path / "b"]) as source:
        assert source.fields["label"].classes == ("ant", "cat", "emu")
        assert source.read_batch(range(4))["label"].tolist() == [1, 2, 0, 2]
        assert source.shard_lengths == (2, 2)
    apart = [dataload.open(tmp_path / name) for name in ("a", "b")]
    message = r"field 'label' stands for other classes in source 0 than in source 1: open the folders"
    with pytest.raises(ConfigError, match=message):
        len(dataload.sources.ConcatSource(apart))
    for name, source in zip(("as", "bs"), apart, strict=True):
        convert(source, tmp_path / name / "x.syr")
    with pytest.raises(ConfigError, match=r"field 'label' stands for other classes in x\.syr than in x\.syr: open the"):
        dataload.open([tmp_path / "as", tmp_path / "bs"])
    assert len(dataload.sources.ConcatSource([apart[0], apart[0]])) == 4
    fill(tmp_path / "c", ["ant/3.wav"])
    with pytest.raises(ConfigError, match=r"a has the fields __key__, image, label, and .*c __key__, audio, sample_ra"):
        dataload.open([tmp_path / "a", tmp_path / "c"])
    for name, labels in (("d", "78"), ("e", "xy")):
        rows = "".join(f"{i}.png,{label}\n" for i, label in enumerate(labels))
        (fill(tmp_path / name, ["0.png", "1.png"]) / "metadata.csv").write_text(f"file_name,label\n{rows}")
    with pytest.raises(ConfigError, match=r".*/e has names as labels, but .*/d has numbers"):
        dataload.open([tmp_path / "d", tmp_path / "e"])


def test_files_that_changed_or_vanished(tmp_path):
    root = fill(tmp_path / "img", [f"cat/{name}.png" for name in "abcde"])
    (root / "cat" / "e.png").write_bytes(image(np.zeros((2, 2), np.uint16)))
    with dataload.open(root) as source:
        a, b, c, d, _ = sorted(root.glob("*/*"))
        a.write_bytes(image(0) + b"x")
        c.write_bytes(b"x" * len(image(2)))
        os.utime(c, (0, 0))  # as if nobody had overwritten it
        b.unlink()
        d.unlink()
        os.mkfifo(d)
        refuses(source, [0], "the file had .* bytes when it was opened and has", path=str(a), index=0)
        refuses(source, [1], r"there is no .*cat/b\.png", SourceNotFoundError)
        refuses(source, [2], "named as PNG cannot be decoded as such", path=str(c), index=2)
        refuses(source, [3], "it is a FIFO, and only regular files are opened", dataload.errors.SourceError)
        refuses(source, [4], r"cat/e.png, record 4: .*does not fit", UnsupportedFormatError)


@pytest.mark.parametrize(
    ("limit", "message"),
    [(100, "the file takes .* bytes of memory, and max_record_bytes is 100"), (200, "an image of 4 x 5 pix")],
)
def test_limit(tmp_path, limit, message):
    root = fill(tmp_path / "img", ["cat/a.png", "cat/b.txt"])
    with dataload.open(root, max_record_bytes=limit) as source:
        refuses(source, [0], message, path=str(root / "cat" / "a.png"), index=0)


def test_workers_notice_another_listing(tmp_path):
    root = fill(tmp_path / "img", ["cat/a.png", "cat/b.png"])
    with dataload.open(root) as source:
        with pickling_for_worker():
            sent = pickle.dumps(source)
        kept = pickle.dumps(source)
    (root / "note.txt").write_text("does not count")
    assert len(pickle.loads(sent)) == 2
    fill(root, ["cat/0.png"])
    with pytest.raises(dataload.errors.ChangedFileError):
        len(pickle.loads(sent))
    assert len(pickle.loads(kept)) == 3


def brightness(sample):
    return {"label": sample["label"], "mean": sample["image"].mean(), "__key__": sample["__key__"]}


@pytest.mark.parametrize("name", ["a.tar", "a.syr", "a.lmdb", "a.parquet", "a.array_record"])
def test_converted_data_keep_the_names_of_classes(tmp_path, name):
    root = fill(tmp_path / "img", ["cat/a.png", "cat/b.png", "dog/c.png"])
    with dataload.open(root) as source:
        convert(source, tmp_path / "out" / name, shards=2)
        ok("index", "--manifest", tmp_path / "out")  # computes the fields again
        convert(source, tmp_path / "mapped" / name, map=brightness)
    for directory in ("out", "mapped"):
        with dataload.open(tmp_path / directory, fields=["label"]) as copy:
            assert pickle.loads(pickle.dumps(copy)).fields["label"] == FieldSpec("int64", (), ("cat", "dog"))


def test_texts_that_are_no_classes_are_not_kept(tmp_path):
    class Captions(dataload.MemorySource):
        @property
        def fields(self):
            return {"label": FieldSpec("int64", (), ("a" * (1 << 20), "b"))}

    report = convert(Captions([{"label": 1}]), tmp_path / "out" / "a.syr")
    assert "the names of the classes of 'label' are too long to be kept in the manifest" in report.notes
    assert dataload.open(tmp_path / "out").fields["label"].classes is None


def test_configs_and_the_command_line(tmp_path):
    root = fill(tmp_path / "img", ["cat/a.png", "dog/b.png"])
    text = ok("inspect", root)
    assert f"folder: 2 records in 1 shard, {len(image(0)) + len(image(1))} bytes" in text
    assert "label: 2 classes, cat, dog" in text
    assert '"classes": [' in ok("inspect", root, "--json")
    split = fill(tmp_path / "data", SPLIT)
    assert '"records": 6' in ok("inspect", split, "-o", "split=train", "--json")
    for source, labels in (
        ({"path": str(root), "decode": "auto"}, [[0, 1]]),
        ({"path": str(split), "split": "train"}, [[0, 1], [1, 1], [2, 3]]),
    ):
        with dataload.from_config({"source": source, "loader": {"batch_size": 2}}) as loader:
            assert [batch["label"].tolist() for batch in loader] == labels
    done = run("stats", root)
    assert done.output.splitlines()[-1] == "not kept: the data are single files"
    assert "earlier run" not in done.output
    assert "2 records in 1 file: all can be read" in ok("verify", root)
    (root / "dog" / "b.png").write_bytes(b"x")
    assert "dog/b.png" in fail(1, "verify", root).output.replace("\n", "")
