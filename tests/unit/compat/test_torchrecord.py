"""The facade of TorchRecord; tests/golden/torchrecord was written by TorchRecord 0.1.1."""

import inspect
import os
import pickle
import random
import shutil
import tempfile

import lmdb
import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from golden_values import TORCHRECORD, TORCHRECORD_CASES, same_bytes, torchrecord_cases
from google.protobuf.message import DecodeError
from PIL import Image

from dataload.codecs.tensorprotos import decode
from dataload.compat import torchrecord
from dataload.compat.torchrecord import (
    TensorProto,
    TensorProtos,
    TorchRecord,
    TRDataset,
    TRSampler,
    Writer,
    default_data_process_func,
)
from dataload.errors import CorruptFileError
from dataload.sources.lmdb.writer import LMDBWriter

NUMBERS = {"float_data": "<f4", "int32_data": "<i4", "int64_data": "<i8", "double_data": "<f8"}


def check_message(message, expected):
    """The raw fields, as the original's protobuf class returned them."""
    assert len(message.protos) == len(expected["tensors"])
    for tensor, raw in zip(message.protos, expected["tensors"], strict=True):
        assert (tensor.name if tensor.HasField("name") else None) == raw["name"]
        assert list(tensor.dims) == raw["dims"]
        assert tensor.data_type == raw["data_type"]
        assert TensorProto.DataType.Name(tensor.data_type) == raw["data_type_name"]
        assert tensor.HasField("data_type") == raw.get("data_type_set", True)
        for field, dtype in NUMBERS.items():
            assert len(getattr(tensor, field)) == raw.get(field, {"count": 0})["count"]
            if field in raw:
                assert same_bytes(np.array(getattr(tensor, field), dtype).tobytes(), raw[field])
        assert tensor.HasField("byte_data") == ("byte_data" in raw)
        assert same_bytes(tensor.byte_data, raw.get("byte_data", {"hex": ""}))
        assert [text.hex() for text in tensor.string_data] == raw.get("string_data", [])


def itself(message):
    return message


def stored(path):
    """Keys and values of each sub-database, by lmdb alone; of a copy, for LMDB opens a file once in a process."""
    with (
        tempfile.TemporaryDirectory() as folder,
        lmdb.open(os.path.dirname(shutil.copy(path / "data.mdb", folder)), lock=False, max_dbs=9) as environment,
    ):
        with environment.begin() as txn:
            names = [bytes(name) for name, _ in txn.cursor()]
        found = []
        for name in names:
            with environment.begin(db=environment.open_db(name, create=False)) as txn:
                found.append([(bytes(key), bytes(value)) for key, value in txn.cursor()])
    return found


@pytest.mark.parametrize(
    "case", [*torchrecord_cases("ok"), *(case for case in torchrecord_cases("error") if "inconsistent" in case.id)]
)
def test_golden_values(case):
    """Also where sub-databases have keys of different widths, which the original reads wrong, and where tensors
    contradict themselves."""
    dataset = TRDataset(TORCHRECORD / case["file"], transform=itself, record_num=case["record_num"])
    assert len(dataset) == case["num_records"]
    for expected in case["records"]:
        place = (expected["db"], int(expected["key"]), 0)
        check_message(dataset[place], expected)
    places = [(expected["db"], int(expected["key"]), 0) for expected in case["records"]]
    for message, expected in zip(dataset.__getitems__(places), case["records"], strict=True):
        check_message(message, expected)


def read_all(case):
    dataset = TRDataset(TORCHRECORD / case["file"], transform=itself, record_num=case["record_num"])
    return [dataset[0, key] for key in range(case["counts"][0])]


@pytest.mark.parametrize("case", [case for case in torchrecord_cases("error") if "inconsistent" not in case.id])
def test_golden_errors(case):
    # DecodeError is what the original raises for a message that is none; no other file could be read by it
    with pytest.raises((DecodeError, ValueError)) as caught:
        read_all(case)
    notes = getattr(caught.value, "__notes__", [])
    assert case["file"] in "".join([str(caught.value), *notes])


def test_a_missing_key_is_not_the_next_one():
    dataset = TRDataset(TORCHRECORD / "corrupt_missing_key", transform=itself)
    with pytest.raises(CorruptFileError, match="key '05' of sub-database db0 is missing"):
        dataset[0, 5]
    assert dataset.read_item(0, 6) == dict(stored(TORCHRECORD / "corrupt_missing_key")[0])[b"06"]


@pytest.mark.parametrize("case", torchrecord_cases("ok")[:2])
def test_default_transform(case):
    """Against the pixels of the manifest, resized as torchvision's Resize((224, 224)) and ToTensor() do.

    The fixed-point weights of torch and of pillow-simd have fewer bits than Pillow's, so a few values are rounded
    differently, most of them where a few pixels become many, as here.
    """
    dataset = TRDataset(TORCHRECORD / case["file"], record_num=case["record_num"])
    raw = TRDataset(TORCHRECORD / case["file"], record_num=case["record_num"], transform=itself)
    for expected in case["records"][:5]:
        place = (expected["db"], int(expected["key"]))
        image, label = dataset[place]
        height, width = expected["image"]["height"], expected["image"]["width"]
        pixels = np.frombuffer(raw[place].protos[0].byte_data, np.uint8).reshape(height, width, 3)
        assert same_bytes(pixels.tobytes(), expected["image"])
        resized = Image.fromarray(pixels).resize((224, 224), Image.Resampling.BILINEAR)
        assert (tuple(image.shape), str(image.dtype)) == ((3, 224, 224), "torch.float32")
        off = image.numpy() * 255 - np.asarray(resized).transpose(2, 0, 1)
        assert np.abs(off).max() < 1.001
        assert (np.abs(off) > 0.001).mean() < 0.06
        assert label == expected["label"]


def test_a_message():
    message = TensorProtos()
    tensor = message.protos.add()
    tensor.dims.extend([2, 1])
    tensor.data_type = TensorProto.INT32
    tensor.int32_data.extend([7, -1])
    tensor.name = "x"
    tensor.segment.begin, tensor.segment.end = 0, 2
    data = message.SerializeToString()
    again = TensorProtos()
    again.ParseFromString(data)
    assert again == message == TensorProtos.FromString(data)
    assert isinstance(again, TensorProtos)
    assert isinstance(tensor, TensorProto)
    assert decode(data)["x"].tolist() == [[7], [-1]]  # our own parser, which knows the wire format only
    assert TensorProto().data_type == TensorProto.FLOAT == 1
    assert (TensorProto.UNDEFINED, TensorProto.FLOAT16, TensorProto.DOUBLE) == (0, 12, 13)
    assert pickle.loads(pickle.dumps(message)) == message
    assert pickle.loads(pickle.dumps(TensorProtos)) is TensorProtos
    assert TensorProtos.__module__ == "dataload.compat.torchrecord"  # pickle would search all modules otherwise


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A list of PNG files with the pixels of golden/torchrecord/db1_20, and its lines, whose paths have no spaces."""
    monkeypatch.chdir(tmp_path)
    lines = []
    for number, (_, value) in enumerate(stored(TORCHRECORD / "db1_20")[0]):
        pixels, label = TensorProtos.FromString(value).protos
        file = tmp_path / f"{number}.png"
        Image.frombytes("RGB", tuple(pixels.dims), pixels.byte_data).save(file)
        lines.append(f"{file.name} {label.byte_data.decode()}")
    (tmp_path / "list.txt").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path / "list.txt", lines


def test_writing_gives_the_values_of_the_original(pictures, tmp_path):
    Writer(str(pictures[0]), str(tmp_path / "out"), shuffle=False).write()
    assert stored(tmp_path / "out") == stored(TORCHRECORD / "db1_20")
    assert os.listdir(tmp_path / "out") == ["data.mdb"]


def test_parts_and_keys(pictures, tmp_path):
    """Parts as the original cuts them; its reader needs keys of one width, that of the largest part."""
    Writer(str(pictures[0]), str(tmp_path / "out"), db_num=3, shuffle=False, map_size=4096).write()
    values = [value for _, value in stored(TORCHRECORD / "db1_20")[0]]
    found = stored(tmp_path / "out")
    assert [len(part) for part in found] == [6, 7, 7]
    assert [value for part in found for _, value in part] == values
    assert [key for key, _ in found[0]] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    Writer(str(pictures[0]), str(tmp_path / "two"), db_num=2, shuffle=False).write()
    assert [key for key, _ in stored(tmp_path / "two")[1]][:2] == [b"00", b"01"]


def test_shuffled_lines(pictures, tmp_path):
    random.seed(7)
    Writer(str(pictures[0]), str(tmp_path / "out"), data_process_func=Line).write()
    random.seed(7)
    random.shuffle(pictures[1])
    assert [value.decode() for _, value in stored(tmp_path / "out")[0]] == pictures[1]


class Line:
    def __init__(self, line):
        self.line = line

    def SerializeToString(self):
        return self.line.encode()


def test_what_is_in_the_output_directory(pictures, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes").write_text("mine")
    (tmp_path / "short.txt").write_text("a\nb")
    Writer(str(pictures[0]), str(out), data_process_func=Line).write()
    Writer(str(tmp_path / "short.txt"), str(out), shuffle=False, data_process_func=Line).write()
    assert stored(out) == [[(b"0", b"a"), (b"1", b"b")]]
    with pytest.raises(ZeroDivisionError):
        Writer(
            str(pictures[0]), str(out), data_process_func=lambda line: 1 / ("10.png" not in line) and Line(line)
        ).write()
    assert stored(out) == [[(b"0", b"a"), (b"1", b"b")]]
    assert sorted(os.listdir(out)) == ["data.mdb", "notes"]
    with LMDBWriter(tmp_path / "plain") as plain:
        plain.write(b"x")
    before = (tmp_path / "plain" / "data.mdb").read_bytes()
    with pytest.raises(ValueError, match=r"plain.data\.mdb is not a TorchRecord and will not be replaced"):
        Writer(str(tmp_path / "short.txt"), str(tmp_path / "plain"), data_process_func=Line).write()
    assert (tmp_path / "plain" / "data.mdb").read_bytes() == before


def test_images_are_decoded_as_their_names_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8))
    for name in ("a.png", "a.bmp", "a.jpg", "a.gif"):
        picture.save(tmp_path / name)
        message = default_data_process_func(f"{name} 3")
        with Image.open(tmp_path / name) as image:
            assert message.protos[0].byte_data == image.convert("RGB").tobytes()
            assert list(message.protos[0].dims) == [7, 5]
    (tmp_path / "b.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")
    with pytest.raises(CorruptFileError, match="named as JPEG cannot be decoded as such: its content is EPS"):
        default_data_process_func("b.jpg 3")


DB4 = TORCHRECORD / "db4_39"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        *(
            (lambda name=name: Writer(name), ValueError, r"data_list must be a \.txt or \.csv file, got")
            for name in (None, "list", "list.json")
        ),
        (lambda: Writer("list.txt", db_num=0), ValueError, "db_num must be an integer >= 1, got 0"),
        (lambda: Writer("none.txt").write(), FileNotFoundError, r"there is no .*none\.txt"),
        (lambda: default_data_process_func("a.png"), IndexError, r"must be 'path label', got 'a\.png'"),
        (lambda: TRSampler(DB4, 0), ValueError, "record_num must be an integer >= 1, got 0"),
        (lambda: TRSampler(DB4, 4, batch_size=0), ValueError, "batch_size must be an integer >= 1, got 0"),
        (lambda: TRDataset(DB4, record_num=6), ValueError, r"record_num is 6, but .*db4_39 has no sub-database db4"),
        (lambda: TRDataset("none"), FileNotFoundError, "there is no"),
        *(
            (lambda place=place: TRDataset(DB4, record_num=2)[place], IndexError, text)
            for place, text in [
                ((2, 0), "sub-database 2 is out of range for 2 of "),
                ((-1, -1), "sub-database -1 is out of range for 2 of "),
                ((0, 9), "record 9 is out of range for .* of db0"),
                ((1, 10), "record 10 is out of range for .* of db1"),
                ((0, -1), "record -1 is out of range for .* of db0"),
            ]
        ),
        (lambda: torchrecord.QTensorProto, AttributeError, r"'dataload.compat.torchrecord' has no attribute 'QTen"),
    ],
)
def test_messages(call, error, text):
    with pytest.raises(error, match=text):
        call()


def places_of(sampler):
    return [place for batch in sampler for place in batch]


@pytest.mark.parametrize("batch_size", [1, 7, 39, 100])
def test_an_epoch_has_every_record_once(batch_size):
    sizes = [min(batch_size, 39 - at) for at in range(0, 39, batch_size)]
    for options in ({"shuffle": True}, {"full_shuffle": True}, {"shuffle": True, "full_shuffle": True}):
        sampler = TRSampler(TORCHRECORD / "db4_39", 4, batch_size=batch_size, num_workers=2, **options)
        first, second = list(sampler), list(sampler)
        assert [len(batch) for batch in first] == sizes
        assert len(sampler) == len(first)
        assert first != second
        places = [(part, key) for part, length in enumerate([9, 10, 10, 10]) for key in range(length)]
        for epoch in ([place for batch in batches for place in batch] for batches in (first, second)):
            assert sorted(place[:2] for place in epoch) == places
            ends = {part: at for at, (part, _, _) in enumerate(epoch)}
            assert [closes for _, _, closes in epoch] == [at == ends[part] for at, (part, _, _) in enumerate(epoch)]


def test_the_seed_is_that_of_random():
    epochs = []
    for seed in (3, 3, 4):
        random.seed(seed)
        sampler = TRSampler(TORCHRECORD / "db4_39", 4, shuffle=True)
        epochs.append([list(sampler), list(sampler)])
    assert epochs[0] == epochs[1]
    assert epochs[0][0] not in epochs[2]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """2 sub-databases of 1,000 records."""
    folder = tmp_path_factory.mktemp("many")
    (folder / "list.txt").write_text("".join(f"{n}\n" for n in range(2000)))
    Writer(str(folder / "list.txt"), str(folder / "out"), db_num=2, shuffle=False, data_process_func=Line).write()
    return folder / "out"


def test_the_pool_goes_through_the_sub_databases_in_turn(many):
    """With 64 records in the pool, a record of db1 comes at most 63 places before the last of db0 was read."""
    order = [place[:2] for place in places_of(TRSampler(many, 2, shuffle=True, batch_size=8))]
    first_of_db1 = next(at for at, (number, _) in enumerate(order) if number == 1)
    assert 1000 - 64 < first_of_db1 <= 1000
    keys = [key for number, key in order if number == 0]
    assert keys[:500] != sorted(keys[:500])
    assert np.abs(np.array(keys) - np.arange(1000)).mean() > 200  # all of a sub-database is shuffled, not 64
    wide = [place[0] for place in places_of(TRSampler(many, 2, shuffle=True, batch_size=100))]
    assert 1000 - 400 < wide.index(1) <= 1000 - 300
    wide = [place[0] for place in places_of(TRSampler(many, 2, shuffle=True, batch_size=100, num_workers=3))]
    assert 1 in wide[:500]  # 1,200 in the pool; with 400 it would come after 600


class Text:
    def ParseFromString(self, data):
        self.text = data.decode()

    @staticmethod
    def number(message):
        return int(message.text)


def test_other_messages(many):
    dataset = TRDataset(many, Text.number, record_num=2, shuffle=True, batch_size=4, proto=Text)
    assert dataset[1, 5, 0] == 1005
    assert dataset.__getitems__([(1, 0, 0), (0, 7, 0)]) == [1000, 7]
    assert dataset.__getitems__([1005, np.int64(7), -1]) == [1005, 7, 1999]
    with pytest.raises(IndexError, match="2000"):
        dataset[2000]
    assert dataset.read_item(0, 999) == b"999"
    assert dataset.parse_byte(b"12") == 12
    dataset.transform = lambda message: int("x" + message.text)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        dataset[1, 2]
    assert caught.value.__notes__ == [f"in {many}, record 2 of db1"]


def test_a_subclass_that_changes_samples_changes_batches(many):
    class Negated(TRDataset):
        def __getitem__(self, item):
            return -super().__getitem__(item)

    dataset = Negated(many, Text.number, proto=Text)
    assert dataset.__getitems__([(0, 5, 0), (0, 6, 0)]) == [dataset[0, 5], -6] == [-5, -6]


def test_pickling(many):
    dataset = TRDataset(many, Text.number, 2, proto=Text)
    assert pickle.loads(pickle.dumps(dataset))[1, 1] == dataset[1, 1] == 1001
    default = TRDataset(TORCHRECORD / "db1_20", itself)
    explicit = TRDataset(TORCHRECORD / "db1_20", itself, proto=TensorProtos)
    assert pickle.loads(pickle.dumps(default))[0, 3] == pickle.loads(pickle.dumps(explicit))[0, 3] == default[0, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_the_loader(workers):
    """Those that torch's own loader makes of the dataset and the sampler, epoch for epoch."""
    settings = (TORCHRECORD / "db4_39", 3, True)
    random.seed(5)
    sampler = TRSampler(*settings, batch_size=8, num_workers=workers)
    expected = torch_data.DataLoader(TRDataset(TORCHRECORD / "db4_39", record_num=3), batch_sampler=sampler)
    random.seed(5)
    loader = TorchRecord(*settings, batch_size=8, num_workers=workers)
    assert isinstance(loader, torchrecord.DataLoader)
    assert len(loader) == 4
    for _ in range(2):
        for found, batch in zip(loader, expected, strict=True):
            assert [part.dtype for part in found] == [part.dtype for part in batch]
            assert all(map(torch.equal, found, batch))


def test_the_arguments_of_the_loaders_by_position():
    """The original has a copy of torch 0.4's loader."""
    records = next(case for case in TORCHRECORD_CASES if case["file"] == "db4_39")["records"]
    loader = TorchRecord(DB4, 4, False, 16, 0, lambda message: int(message.protos[1].byte_data))
    assert [label for labels in loader for label in labels.tolist()] == [record["label"] for record in records]
    arguments = """dataset batch_size shuffle sampler batch_sampler num_workers collate_fn pin_memory drop_last timeout
        worker_init_fn"""
    assert list(inspect.signature(torchrecord.DataLoader).parameters)[:11] == arguments.split()
    (batch,) = torchrecord.DataLoader(range(3), 4)
    assert batch.tolist() == [0, 1, 2]
