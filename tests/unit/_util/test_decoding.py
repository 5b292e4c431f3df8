"""Decoding is counted by the clock of the thread that decodes, once, and only while a loader reads."""

import pytest

from dataload._util import clock as module
from dataload._util.clock import DecodeClock, decoding, downloading, reading


@pytest.fixture
def tick(monkeypatch):
    """A clock that moves when it is told to."""
    now = [100.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return lambda seconds: now.append(now.pop() + seconds)


def test_what_is_decoded_is_added_up_and_nested_decoding_counts_once(tick):
    clock = DecodeClock()
    with clock:
        tick(1)
        for _ in range(3):
            with decoding():
                tick(2)
            tick(4)
        with decoding():
            tick(10)
            with decoding():
                tick(20)
            tick(40)
    assert (clock.take_seconds(), clock.take_seconds()) == (76, 0)


def test_reads_and_downloads_are_no_decoding(tick):
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


def test_a_decoder_that_raises_is_counted_and_the_next_one_too(tick):
    def fail():
        with decoding():
            tick(1)
            raise ZeroDivisionError

    clock = DecodeClock()
    with clock:
        with pytest.raises(ZeroDivisionError):
            fail()
        with decoding():
            tick(2)
    assert clock.take_seconds() == 3
