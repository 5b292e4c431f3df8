"""Decoded parts of files: which stay, and who decodes them."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from dataload.sources.decoded import DecodedCache


def test_the_parts_used_last_stay_within_the_limit():
    cache, decoded = DecodedCache(10), []

    def get(key, size=5):
        return cache.get(key, lambda: decoded.append(key) or (key.upper(), size))

    assert [get(key) for key in "abacab"] == list("ABACAB")
    assert decoded == list("abcb")  # c takes the place of b, b that of c
    assert get("x", 99) == get("x", 99) == "X"  # one part stays, whatever its size
    assert decoded == list("abcbx")
    assert get("a") == "A"
    assert decoded[-1] == "a"
    cache.clear()
    get("a")
    assert decoded[-2:] == ["a", "a"]


def test_a_part_is_decoded_by_one_thread_and_again_after_an_error():
    cache, barrier, decoded = DecodedCache(10), Barrier(4), []

    def get():
        barrier.wait()
        return cache.get("a", lambda: decoded.append("a") or ("A", 1))

    def fail():
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        cache.get("a", fail)
    with ThreadPoolExecutor(4) as pool:
        assert [future.result() for future in [pool.submit(get) for _ in range(4)]] == ["A"] * 4
    assert decoded == ["a"]


def test_a_pickle_has_no_parts():
    cache = DecodedCache(10)
    cache.get("a", lambda: (bytes(5000), 5000))
    data = pickle.dumps(cache)
    assert len(data) < 200
    assert pickle.loads(data).get("a", lambda: ("B", 1)) == "B"
