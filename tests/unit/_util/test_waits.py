"""Waits end by progress or by their deadline, in a time that the test makes."""

import pytest

from dataload._util import threads as waits


@pytest.fixture
def clock(monkeypatch):
    """The time; pauses let it pass."""
    now = [100.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])

    def pause(seconds):
        now[0] += seconds

    pause.now = now
    return pause


def test_without_progress_it_ends_at_the_deadline(clock):
    wait = waits.Wait(2.0, pause=clock)
    looks = sum(1 for _ in iter(lambda: wait.goes_on("the same"), False))
    assert 102 <= clock.now[0] < 102.1
    assert 40 < looks < 60  # the pauses grow
    assert not waits.Wait(0, pause=clock).goes_on("a change")


def test_progress_puts_the_deadline_off_up_to_a_limit(clock):
    wait = waits.Wait(2.0, 10.0, pause=clock)
    while wait.goes_on(int(clock.now[0])):
        pass
    assert 110 <= clock.now[0] < 110.1
