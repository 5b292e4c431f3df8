"""The one table of jobs, and attempts of their parts."""

import pytest

from dataload.jobs.engine import attempt, value_of
from dataload.jobs.run import Mode, decide

ASKED = {
    "fresh": Mode(),
    "resume": Mode(resume=True),
    "overwrite": Mode(overwrite=True),
    "part": Mode(part=(1, 2)),
    "merge": Mode(merge=True),
    "part overwrite": Mode(part=(1, 2), overwrite=True),
}
# Of a cell with two steps, the second is where shards exist; with three, the third is at a URL, where no shard exists.
TABLE = {
    # at the destination: fresh, resume, overwrite, part, merge, part that overwrites
    "nothing": ("begin exists", "begin exists", "begin", "begin exists", "not-begun", "begin"),
    "one run": ("begin exists unfinished", "go-on", "begin", "different", "not-in-parts", "begin"),
    "two parts": ("in-parts", "different", "begin", "go-on", "join", "go-on"),
    "complete": ("begin exists", "go-on", "begin", "check", "check", "begin"),
    "another plan": ("begin exists unfinished", "different", "begin", "different", "different", "begin"),
    "another plan in parts": ("in-parts", "different", "begin", "different", "different", "begin"),
}
HEADS = {"nothing": "none", "two parts": "parts", "another plan": "one run", "another plan in parts": "parts"}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize(("found", "asked"), [(found, asked) for found in TABLE for asked in ASKED])
def test_the_table(found, asked, taken, shared):
    cell = [step.replace("-", " ") for step in TABLE[found][[*ASKED].index(asked)].split()]
    expected = cell[min(1, len(cell) - 1)] if taken else cell[-1] if shared and len(cell) == 3 else cell[0]
    # Plans are compared with their number of parts, which a complete conversion does not have any more.
    other_parts = {"one run": ("part", "part overwrite"), "two parts": ("resume",)}
    same = not found.startswith("another") and asked not in other_parts.get(found, ())
    assert decide(ASKED[asked], HEADS.get(found, found), same=same, taken=taken, shared=shared) == expected


def test_an_engine_goes_on_with_as_many_parts():
    assert decide(Mode(resume=True), "parts", same=True, taken=True, shared=False) == "go on"


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
