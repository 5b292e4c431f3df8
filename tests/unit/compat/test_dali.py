"""What tests/golden/test_dali.py does not show: messages, types, and orders against a plain model."""

import enum
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_files import pack

from dataload.compat.dali import EpochOrder, IndexStream, webdataset
from dataload.errors import ConfigError


@pytest.fixture
def archive(tmp_path):
    """Ten samples: an int32 that counts, and a text that only the even ones have."""
    files = {}
    for i in range(10):
        files[f"{i}.num"] = np.int32(i).tobytes()
        if i % 2 == 0:
            files[f"{i}.txt"] = f"text {i}".encode()
    return str(pack(tmp_path / "a.tar", files))


@pytest.fixture
def opened(archive):
    """Readers of that archive, closed at the end."""
    readers = []

    def open_one(**options):
        readers.append(webdataset(**{"paths": archive, "ext": "num", "dtypes": "INT32", "batch_size": 4, **options}))
        return readers[-1]

    yield open_one
    for reader in readers:
        reader.close()


def numbers(reader, batches=1):
    return [int(array[0]) for batch in itertools.islice(reader, batches) for array in batch[0]]


def test_a_batch_is_a_tuple_of_lists_of_arrays(opened):
    reader = opened(ext=["num", "txt"], dtypes=["INT32", "UINT8"], batch_size=2)
    batch = reader.run()
    assert isinstance(batch, tuple)
    assert [type(output) for output in batch] == [list, list]
    assert [[array.tolist() for array in output] for output in batch] == [[[0], [1]], [list(b"text 0"), []]]
    assert [array.dtype for output in batch for array in output] == ["int32"] * 2 + ["uint8"] * 2
    assert iter(reader) is reader


LACKS = {"ext": ["num", "jpg;txt"], "dtypes": None}


class Dalis(enum.Enum):
    """As nvidia.dali.types.DALIDataType."""

    INT32 = 9
    BOOL = 11


@pytest.mark.parametrize("dtype", ["INT32", "int32", np.int32, np.dtype("int32"), Dalis.INT32])
def test_a_dtype_may_be_a_name_or_dalis_or_numpys(opened, dtype):
    for dtypes in (dtype, [dtype], (dtype,)):
        assert next(opened(dtypes=dtypes))[0][3].tolist() == [3]


def test_needless_keywords_change_nothing(opened):
    needless = {"dont_use_mmap": True, "read_ahead": True, "prefetch_queue_depth": 3, "skip_cached_images": True}
    needless |= {"preserve": True, "bytes_per_sample_hint": [10, 20], "tensor_init_bytes": 1, "device": "cpu"}
    assert numbers(opened(**needless, name="Reader"), 4) == numbers(opened(), 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"dtypes": [dtype]}, r"dtypes: an output cannot have type .*: .*choose from FLOAT, FLOAT16, .*UINT8$")
            for dtype in (Dalis.BOOL, "no", np.dtype(">i4"), ">i4", bool, object, 9)
        ),
        ({"ext": []}, r"ext must be one or more sets of extensions \('jpg;png', 'cls'\), got \[\]"),
        ({"dtypes": ["INT32", "INT32"]}, "dtypes names 2 types for 1 outputs: give one for each"),
        ({"missing_component_behavior": "emtpy"}, "missing_component_behavior is 'emtpy': did you mean 'empty'"),
        ({"index_paths": ["a", "b"]}, "index_paths names 2 files for 1 archives: pass one for each, in the same order"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"num_shards": 0}, "num_shards must be an integer >= 1, got 0"),
        ({"num_shards": 2, "shard_id": 2}, r"shard_id must be an integer in \[0, 2\), got 2"),
        ({"lazy_init": True, "shard_id": 1}, r"shard_id must be an integer in \[0, 1\), got 1"),
        ({"num_shards": 11}, "num_shards is 11, but there are only 10 samples: each needs one"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"shuffle_after_epoch": True, "stick_to_shard": True}, "shuffle_after_epoch and stick_to_shard cannot both"),
        ({"pad_last_batch": 2}, "pad_last_batch must be True or False, got 2"),
        ({"device": "gpu"}, "device is 'gpu': did you mean 'cpu'"),
        ({"name": 1}, "name must be a string or None, got 1"),
        ({"prefetch_queue_depth": 0}, "prefetch_queue_depth must be an integer >= 1, got 0"),
        ({"random_shuffle": True, "initial_fill": 0}, r"initial_fill must be an integer in \[1, 2147483648\), got 0"),
        (
            {"paths": ["{a}", "{a}"], "index_paths": ["a.idx", "b.idx"]},
            r"{a} is in paths twice, with two indexes: a.idx, b.idx",
        ),
        (
            {**LACKS, "missing_component_behavior": "error"},
            r"missing_component_behavior: .*sample 1 \('1'\): has no 'jpg;txt'; 'skip' leaves such samples out, 'emp",
        ),
        ({**LACKS, "missing_component_behavior": "error", "index_paths": "{i}"}, ".*{a}: sample 1: has no 'jpg;txt'"),
        *(
            (
                {"ext": ["txt", "jpg"], "dtypes": ["INT32", "UINT8"], "missing_component_behavior": missing},
                r"dtypes: {a}: sample 0 \('0'\): 'txt' has 6 bytes, which is not a multiple of the size of int32",
            )
            for missing in ("empty", "skip")
        ),
    ],
)
def test_wrong_arguments(opened, archive, tmp_path, options, message):
    (tmp_path / "a.idx").write_text("v1.2 2\nnum 512 4 txt 1536 6\nnum 2560 4\n")  # has no names of samples
    places = {"{a}": archive, "{i}": str(tmp_path / "a.idx")}
    for name in ("paths", "index_paths"):
        if name in options:
            given = options[name]
            found = places.get(given, given) if isinstance(given, str) else [places.get(each, each) for each in given]
            options = {**options, name: found}
    with pytest.raises(ConfigError, match=f"^{message.replace('{a}', archive)}"):
        opened(**options)


def test_files_that_are_passed_over_are_warned_of(opened, archive):
    with pytest.warns(UserWarning, match=rf"^{archive}: several files of one sample match output 1: the first one"):
        reader = opened(ext=["num", "txt;num"], dtypes=None, batch_size=2)
    assert [array.size for array in next(reader)[1]] == [4, 4]


def test_without_a_seed_each_reader_has_its_own_order(opened):
    orders = [numbers(opened(random_shuffle=True), 10) for _ in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted([*range(10)] * 4)


def test_archives_are_shuffled_after_each_epoch_by_their_own_seed(opened, tmp_path):
    paths = [str(pack(tmp_path / f"{i}.tar", {"0.num": np.int32(i).tobytes()})) for i in range(8)]

    def epochs(**settings):
        found = numbers(opened(paths=paths, batch_size=8, **settings), 3)
        return [found[start : start + 8] for start in range(0, 24, 8)]

    assert epochs() == [[*range(8)]] * 3
    first = epochs(shuffle_after_epoch=True)
    assert [sorted(epoch) for epoch in first] == [[*range(8)]] * 3
    assert len({*map(tuple, first)}) == 3
    for seed in (0, 1, -1):
        assert (epochs(shuffle_after_epoch=True, shuffle_after_epoch_seed=seed) == first) == (seed == 0)


def plan(**options):
    defaults = {"batch_size": 4, "num_shards": 1, "shard_id": 0, "stick": False, "pad": False}
    return EpochOrder(**{**defaults, "pool_size": None, "seed": 0, "archives_seed": None, **options})


def model(samples, epochs, *, batch_size, num_shards, shard_id, stick, pad):
    """Epoch by epoch, as DALI's documentation of sharding tells it."""
    stream = []
    for epoch in range(epochs):
        shard = shard_id if stick else (shard_id + epoch) % num_shards
        part = list(range(samples * shard // num_shards, samples * (shard + 1) // num_shards))
        if pad:
            largest = max(samples * (s + 1) // num_shards - samples * s // num_shards for s in range(num_shards))
            while len(part) < largest or len(part) % batch_size:
                part.append(part[-1])
        stream += part
    return stream


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_stream_is_that_of_the_model(data):
    samples = data.draw(st.integers(1, 40))
    num_shards = data.draw(st.integers(1, samples))
    options = {
        "batch_size": data.draw(st.integers(1, 50)),
        "num_shards": num_shards,
        "shard_id": data.draw(st.integers(0, num_shards - 1)),
        "stick": data.draw(st.booleans()),
        "pad": data.draw(st.booleans()),
    }
    expected = model(samples, 4, **options)
    stream, found = IndexStream(plan(**options), (samples,)), []
    while len(found) < len(expected):
        found += stream.take(data.draw(st.integers(1, 50))).tolist()
    assert found[: len(expected)] == expected
