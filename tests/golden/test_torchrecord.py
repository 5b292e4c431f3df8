"""What the original TorchRecord and the lmdb package wrote, value by value; see torchrecord/README.md."""

import numpy as np
import pytest
from golden_values import TORCHRECORD, TORCHRECORD_CASES, same_bytes, torchrecord_cases

from dataload.collate import default_collate
from dataload.errors import DataloadError
from dataload.sources.lmdb.reader import LMDBSource
from dataload.sources.lmdb.torchrecord import TorchRecordSource

# "label" in the manifest is the text of the data list; for a tensor without a name its place is the name.


def names_of(tensors):
    """A name that is unset, empty or taken gives way to the tensor's place."""
    names = []
    for place, tensor in enumerate(tensors):
        name = tensor["name"]
        names.append(name if name and name not in names else str(place))
    return names


def check_tensor(value, tensor):
    kind, dims, array = tensor["data_type_name"], tensor["dims"], tensor["array"]
    if kind == "BYTE" and not dims:
        assert type(value) is bytes
        assert same_bytes(value, array)
    elif kind == "STRING" and not dims:
        assert value == bytes.fromhex(array["items_hex"][0]).decode()
    elif kind == "STRING":
        assert value.dtype == object
        assert value.shape == tuple(dims)
        assert [item.hex() for item in value.ravel()] == array["items_hex"]
    else:
        assert isinstance(value, np.ndarray)
        assert value.dtype.name == array["dtype"]
        shape = array["shape"]
        assert value.shape == ((value.size,) if shape is None else tuple(shape))
        assert value.flags.writeable
        assert same_bytes(value.tobytes(), array)


def check_record(record, expected):
    names = names_of(expected["tensors"])
    assert list(record) == names
    for name, tensor in zip(names, expected["tensors"], strict=True):
        check_tensor(record[name], tensor)


def db_num_of(case):
    return case["record_num"]


@pytest.mark.parametrize("case", torchrecord_cases("ok"))
def test_records(case):
    with TorchRecordSource(TORCHRECORD / case["file"], db_num=db_num_of(case)) as source:
        assert len(source) == case["num_records"] == sum(case["counts"])
        for index, expected in enumerate(case["records"]):
            check_record(source[index], expected)
        for record, expected in zip(source.read(range(len(source))), case["records"], strict=True):
            check_record(record, expected)


@pytest.mark.parametrize("case", torchrecord_cases("ok")[:2])
def test_pictures(case):
    """Pixels are a flat array, for the dims are [width, height] without the 3; the label is its text."""
    with TorchRecordSource(TORCHRECORD / case["file"]) as source:
        for record, expected in zip(source, case["records"], strict=True):
            image = expected["image"]
            assert record["0"].shape == (image["height"] * image["width"] * 3,)
            assert same_bytes(record["0"].reshape(image["array_shape"]).tobytes(), image)
            assert int(record["1"]) == expected["label"]


def test_one_batch_of_pictures_of_one_size():
    """The fast path on the original's own bytes."""
    with TorchRecordSource(TORCHRECORD / "db4_39") as source:
        records = source.read(range(len(source)))
        indices = [i for i, record in enumerate(records) if record["0"].shape == records[3]["0"].shape] * 5
        batch = source.read_batch(indices)
        slow = default_collate([source[index] for index in indices])
        assert batch["1"] == slow["1"]
        assert np.array_equal(batch["0"], slow["0"])


@pytest.mark.parametrize("case", torchrecord_cases("error"))
def test_errors(case):
    path = TORCHRECORD / case["file"]

    def open_():
        return TorchRecordSource(path, db_num=db_num_of(case))

    def read_all():
        with open_() as source:
            return list(source)

    with pytest.raises(DataloadError) as caught:
        read_all()
    assert str(path) in str(caught.value)
    if "bad_records" not in case:
        return
    with open_() as source:
        assert len(source) == case["num_records"]
        for index, expected in enumerate(case["records"]):
            if index in case["bad_records"]:
                with pytest.raises(DataloadError, match=f"record {index}: key 0*{index} of sub-database db0"):
                    source[index]
            else:
                check_record(source[index], expected)


def test_a_missing_key_costs_only_its_own_record():
    case = next(case for case in TORCHRECORD_CASES if case["file"] == "corrupt_missing_key")
    by_key = {record["key"]: record for record in case["records"]}
    with TorchRecordSource(TORCHRECORD / case["file"]) as source:
        with pytest.raises(DataloadError, match="record 5: key '05' of sub-database db0 is missing, which has 12"):
            source[5]
        for index in (4, 6, 11):
            check_record(source[index], by_key[f"{index:02}"])


@pytest.mark.parametrize("case", torchrecord_cases("ok", "lmdb"))
def test_plain(case):
    with LMDBSource(TORCHRECORD / case["file"]) as source:
        assert len(source) == case["num_records"]
        records = case["records"]
        is_number = all(bytes.fromhex(record["key_hex"]).isdigit() for record in records)
        assert source.key_order == ("number" if is_number else "bytes")
        order = case.get("numeric_order", range(len(records)))
        for index, place in enumerate(order):
            expected = records[place]
            wanted = {"hex": expected["value_hex"]} if "value_hex" in expected else expected
            assert same_bytes(source[index], wanted)
            assert same_bytes(source.read([0, index])[1], wanted)


def test_every_case_is_tested():
    kinds = {(case["format"], case["expect"]) for case in TORCHRECORD_CASES}
    assert kinds == {("torchrecord", "ok"), ("torchrecord", "error"), ("lmdb", "ok")}
