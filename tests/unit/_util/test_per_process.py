"""Values that are dropped while they are made."""

import pickle
import threading

import numpy as np
import pytest

import dataload
from dataload._util.caches import PerProcess
from dataload.errors import ClosedSourceError
from dataload.sources.syrah.reader import SyrahSource


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
    with dataload.create(path) as writer:
        writer.write({"n": np.arange(3)})

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
