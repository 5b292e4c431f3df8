"""Rows that one process makes and another reads; here both are this one."""

import threading
from pathlib import Path
from weakref import WeakMethod

import numpy as np

from dataload.executors.transport import RowClient, RowServer


class Rows:
    fail = False

    def read(self, indices, out):
        if self.fail:
            raise ValueError(indices)
        out[...] = (indices % 251)[:, None, None] + np.arange(6).reshape(2, 3)


def read(client, indices):
    out = np.zeros((len(indices), 2, 3), np.uint8)
    assert client.read(np.array(indices, np.int64), out) is bool(out.any())
    return out[:, 0, 0].tolist() if (out == out[:, :1, :1] + np.arange(6).reshape(2, 3)).all() else None


def test_rows_are_served_until_the_server_or_its_reader_ends():
    rows, before = Rows(), {*threading.enumerate()}
    server = RowServer(WeakMethod(rows.read), (2, 3))
    first, second = RowClient(server.address), RowClient(server.address)
    for indices in ([4], [5, 250, 252 + 2**40], range(1000), [7]):  # the shared memory grows once
        expected = [index % 251 for index in indices]
        assert read(first, indices) == expected
    assert all(thread.daemon for thread in {*threading.enumerate()} - before), "no process waits for them at its end"
    rows.fail = True
    assert read(first, [4]) is None, "the caller has to make them"
    rows.fail = False
    assert read(second, [8]) == [8], "the server has accepted both"
    server.close()
    assert not Path(server.address).parent.exists()
    late = RowClient(server.address)
    assert read(late, [4]) is None
    assert read(second, [9]) == read(first, [9]) == [9], "those that are connected stay"
    first.close()
    assert read(first, [4]) is None
    del rows
    assert read(second, [4]) is None
    for client in (first, second, late):
        client.close()
