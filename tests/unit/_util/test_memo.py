"""A memory of a few keys."""

import pickle

import numpy as np
import pytest

from dataload._util.caches import Memo


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_memo_holds_the_last_keys(size):
    memo = Memo() if size == 2 else Memo(size)
    assert memo.recall(0) is None
    for key in range(200):
        assert memo.keep((key, "key"), key) == key
    assert [memo.recall((key, "key")) for key in range(200)] == [None] * (200 - size) + list(range(200 - size, 200))
    memo.keep((200 - size, "key"), "again")  # the oldest is known, so nothing is forgotten, and it is now the newest
    assert memo.recall((199, "key")) == (199 if size > 1 else "again")
    for key in range(size - 1):
        memo.keep(key, None)
    assert memo.recall((200 - size, "key")) == "again"
    memo.keep("one more", None)
    assert memo.recall((200 - size, "key")) is None


def test_a_memo_comes_out_of_a_pickle_empty():
    memo = Memo()
    memo.keep(0, np.arange(1000))
    data = pickle.dumps(memo)
    assert len(data) < 100
    assert pickle.loads(data).recall(0) is None
    large = pickle.loads(pickle.dumps(Memo(5)))
    for key in range(5):
        large.keep(key, key)
    assert [large.recall(key) for key in range(5)] == list(range(5))
