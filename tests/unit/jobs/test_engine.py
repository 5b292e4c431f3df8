"""An attempt of a part: its value or its error, and the units that it has done."""

import pytest

from dataload.jobs.engine import attempt, value_of


@pytest.mark.parametrize("units", [(), (3, 7)])
@pytest.mark.parametrize("fails", [False, True])
def test_an_attempt(units, fails):
    def task(*, part, progress):
        for done in units:
            progress(done, 9)
        return 1 / 0 if fails else part

    reported = []
    outcome = attempt(task, (2, 5), reported.append)
    assert (outcome.done, reported) == (max(units, default=0), [*units])
    if not fails:
        assert value_of(outcome, (2, 5)) == (2, 5)
        return
    with pytest.raises(ZeroDivisionError) as caught:
        value_of(outcome, (2, 5), " on a node")
    assert caught.value.__notes__[-1] == "It was raised in part 2/5 on a node."
