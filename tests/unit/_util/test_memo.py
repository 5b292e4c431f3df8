"""A memory of a few keys."""

import pickle

import numpy as np
import pytest

from dataload._util.memo import Memo


def test_a_memo_holds_the_last_two_keys():
    memo = Memo()
    assert memo.recall(0) is None
    assert memo.keep(0, "zero") == "zero"
    memo.keep(1, "one")
    assert (memo.recall(0), memo.recall(1)) == ("zero", "one")
    memo.keep(0, "nought")  # known, so nothing is forgotten
    assert (memo.recall(0), memo.recall(1)) == ("nought", "one")
    memo.keep(2, "two")
    assert [memo.recall(key) for key in range(3)] == ["nought", None, "two"]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_memo_holds_as_many_keys_as_it_shall(size):
    memo = Memo(size)
    for key in range(200):
        memo.keep((key, "key"), key)
    assert [memo.recall((key, "key")) for key in range(200)] == [None] * (200 - size) + list(range(200 - size, 200))
    memo.keep((200 - size, "key"), "again")  # the oldest, and now the last to be forgotten
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
