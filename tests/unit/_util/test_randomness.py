"""Keys by address, and hashes, the same in every release."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload._util.randomness import check_seed, derive_key, derive_keys, hash64
from dataload.errors import ConfigError


def test_seeds_are_integers():
    for seed in (0, -5, 2**100, np.int32(7)):
        assert check_seed(seed) == int(seed)
        assert type(check_seed(seed)) is int
    for seed in (1.0, "1", None, True):
        with pytest.raises(ConfigError) as caught:
            check_seed(seed)
        assert (caught.value.key, caught.value.value) == ("seed", seed)


def test_keys_are_blake2b_of_the_address():
    """Written out once more: a key must not change with a release, nor with numpy's."""
    text = "\x1f".join(["-3", "shuffle", "int:7", "str:a"])
    expected = hashlib.blake2b(text.encode(), digest_size=32, person=b"dataload").digest()
    assert derive_key(-3, "shuffle", 7, "a").tobytes() == expected
    assert derive_key(np.int64(-3), "shuffle", np.int64(7), "a").tobytes() == expected
    for words in (1, 2, 8):
        key = derive_key(0, "x", words=words)
        assert (key.shape, key.dtype) == ((words,), np.uint64)


@given(st.lists(st.tuples(st.integers(), st.integers()), max_size=5), st.integers(1, 8))
def test_keys_made_together_are_those_made_alone(pairs, words):
    keys = derive_keys([seed for seed, _ in pairs], "shuffle", [address for _, address in pairs], words)
    assert keys.shape == (len(pairs), words)
    assert keys.tolist() == [derive_key(seed, "shuffle", address, words=words).tolist() for seed, address in pairs]


def splitmix64(key, value):
    """One value at a time, in Python's integers."""
    mask = 2**64 - 1
    bits = (value * 0x9E3779B97F4A7C15 + key) & mask
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
    return bits ^ (bits >> 31)


@given(key=st.integers(0, 2**64 - 1), values=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_hash64_equals_python_integers(key, values):
    array = np.array(values, np.int64)
    got = hash64(np.uint64(key), array)
    assert got.tolist() == [splitmix64(key, value % 2**64) for value in values]
    assert array.tolist() == values


def test_hash64_of_splitmix64_known_values():
    """The first outputs of the reference generator with state 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert hash64(np.uint64(1234567), np.arange(1, 6)).tolist() == known
