"""Values that are kept: of the last keys, and in each process."""

import pickle
import threading

import numpy as np
import pytest
from written import written

from dataload._util.caches import Memo, PerProcess
from dataload.errors import ClosedSourceError
from dataload.sources.syrah.reader import SyrahSource


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


def test_a_value_that_is_dropped_while_it_is_made_is_forgotten():
    value, begun, go_on = PerProcess(), threading.Event(), threading.Event()

    def make():
        begun.set()
        go_on.wait()
        return "first"

    found = []
    thread = threading.Thread(target=lambda: found.append(value.get(make)))
    thread.start()
    begun.wait()
    assert value.drop() is None
    go_on.set()
    thread.join()
    assert found == ["first"]  # who has asked before
    assert value.get(lambda: "second") == "second"
    assert pickle.loads(pickle.dumps(value)).peek() is None
    assert (value.drop(), value.drop()) == ("second", None)


def test_a_source_that_is_closed_during_its_first_opening_is_closed(tmp_path):
    path, begun, go_on = tmp_path / "x.syr", threading.Event(), threading.Event()
    written(path, [{"n": np.arange(3)}])

    class Slow(SyrahSource):
        def _open_shard(self, path):
            begun.set()
            go_on.wait()
            return super()._open_shard(path)

    source = Slow(path)
    thread = threading.Thread(target=source.__len__)
    thread.start()
    begun.wait()
    source.close()
    go_on.set()
    thread.join()
    with pytest.raises(ClosedSourceError):
        source[0]
