"""Keys by address, and hashes, the same in every release."""

import hashlib
import random

import numpy as np
import pytest

from dataload._util import randomness
from dataload._util.randomness import check_seed, derive_key, derive_word, hash64
from dataload.errors import ConfigError


def test_seeds_are_integers():
    for seed in (0, -5, 2**100, np.int32(7)):
        assert check_seed(seed) == int(seed)
        assert type(check_seed(seed)) is int
    for seed in (1.0, "1", None, True):
        with pytest.raises(ConfigError) as caught:
            check_seed(seed)
        assert (caught.value.key, caught.value.value) == ("seed", seed)


def test_keys_and_hashes_never_change():
    # Written out once more: a key must not change with a release, nor with numpy's.
    text = "\x1f".join(["-3", "shuffle", "int:7", "str:a"])
    expected = hashlib.blake2b(text.encode(), digest_size=32, person=b"dataload").digest()
    assert derive_key(-3, "shuffle", 7, "a").tobytes() == expected
    assert derive_key(np.int64(-3), "shuffle", np.int64(7), "a").tobytes() == expected
    for words in (1, 2, 8):
        key = derive_key(0, "x", words=words)
        assert (key.shape, key.dtype) == ((words,), np.uint64)
    # The first outputs of the reference generator with state 1234567.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert hash64(np.uint64(1234567), np.arange(1, 6)).tolist() == known


def test_the_global_generators_of_a_step_never_change():
    before, restore = random.getstate(), randomness.keep_global_generators()
    for step in (0, 31, 32, 1000):
        randomness.seed_global_generators(3, 2, step)
        word = int(derive_word(3, "global generators", 2, step))
        assert random.random() == random.Random(word).random()
        assert np.random.random() == np.random.RandomState(word & 0xFFFFFFFF).random()  # noqa: NPY002
    restore()
    assert random.getstate() == before
