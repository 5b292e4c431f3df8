"""Decoding is counted by the clock of the thread that decodes, once, and only while a loader reads."""

from dataload._util import clock as module
from dataload._util.clock import DecodeClock, decoding, downloading, reading


def test_reads_and_downloads_are_no_decoding(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def tick(seconds):
        now[0] += seconds

    clock = DecodeClock()
    with clock:
        with downloading(), downloading():
            tick(1)
        with decoding():
            tick(2)
            with downloading():
                tick(4)
            with reading():
                tick(8)
                with downloading():
                    tick(16)
            tick(32)
        with reading():
            tick(64)
    for outside in (decoding, reading, downloading):
        with outside():
            tick(128)
    assert (clock.take_seconds(), clock.take_wait()) == (34, 21)
    assert (clock.take_seconds(), clock.take_wait()) == (0, 0)
