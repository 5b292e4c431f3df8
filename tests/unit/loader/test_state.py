from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from dataload._util.fingerprint import digest, fingerprint, identify
from dataload.errors import StateMismatchError
from dataload.loader.state import LoaderState

STATE = LoaderState(epoch=3, position=2**47, length=2**48, source="a" * 32, order="b" * 32)


@dataclass(frozen=True)
class Inner:
    weights: object
    names: object = ("a",)


@dataclass(frozen=True)
class Outer:
    inner: object
    seed: int = 0
    cache: dict = field(default_factory=dict, compare=False)


class Identified:
    def __init__(self, text):
        self.text = text

    def fingerprint(self):
        return self.text


def test_fingerprint_sees_every_field_at_every_depth():
    different = [
        Outer(Inner(np.arange(3))),
        Outer(Inner(np.arange(3)), seed=1),
        Outer(Inner(np.arange(4))),
        Outer(Inner(np.arange(3, dtype=np.int32))),
        Outer(Inner(np.arange(3).reshape(3, 1))),
        Outer(Inner(np.arange(3), names=("b",))),
        Outer(Inner(np.arange(3), names={"a": 1})),
        Outer(Inner(np.arange(3), names={"a": 2})),
        Outer(Identified("x")),
        Outer(Identified("y")),
        Inner(np.arange(3)),
    ]
    assert len({fingerprint(value) for value in different}) == len(different)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Outer(Inner(np.arange(3)), cache={"x": 1}), Outer(Inner(np.arange(3)), cache={})),
        (Inner(np.arange(6)[::2]), Inner(np.array([0, 2, 4]))),
        (Inner({"a": 1, "b": 2}), Inner({"b": 2, "a": 1})),
        (Inner({"x", "y", "z"}), Inner({"z", "y", "x"})),
        (Inner(np.array(5)), Inner(np.array(5))),
    ],
)
def test_fingerprint_sees_nothing_else(one, other):
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.slow
def test_fingerprint_does_not_depend_on_the_hash_seed():
    program = (
        "from dataload._util.fingerprint import fingerprint;"
        "print(fingerprint({'names': {'a', 'b', 'c', 'd'}, 'deep': [frozenset({'x', 'y'})], 'n': (1, 2.5)}))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=50,
        ).stdout
        for seed in "12"
    }
    assert len(texts) == 1


def test_digest_is_the_same_in_every_release():
    """It stands in saved states."""
    assert digest("a", 1, ("b", None)) == "f94fcd0261326f89ef36f783d2838cb4"


def test_state_survives_json_in_less_than_a_kibibyte():
    text = json.dumps(STATE.to_json())
    assert len(text) < 1024
    assert LoaderState.from_json(json.loads(text)) == STATE


def test_state_of_another_version_is_refused():
    with pytest.raises(
        StateMismatchError, match=r"not a loader's state that this release can read\n  version: 99 in the state, 2 here"
    ):
        LoaderState.from_json({**STATE.to_json(), "version": 99})
    with pytest.raises(StateMismatchError, match="version: None in the state"):
        LoaderState.from_json({})


@pytest.mark.parametrize("state", [0, None, [], "text"])
def test_state_that_is_no_dict_is_refused(state):
    from dataload.streams.state import MultiStreamState

    for kind in (LoaderState, MultiStreamState):
        with pytest.raises(StateMismatchError, match=f"a loader's state is a dict, found {type(state).__name__}"):
            kind.from_json(state)


def test_state_with_missing_or_foreign_keys_is_refused():
    saved = STATE.to_json()
    del saved["epoch"]
    with pytest.raises(StateMismatchError, match="the state is incomplete or has foreign keys: epoch, steps"):
        LoaderState.from_json({**saved, "steps": 3})


def test_state_of_other_data_has_one_line_per_difference():
    here = replace(STATE, source="c" * 32, length=5, epoch=0, position=0)
    with pytest.raises(StateMismatchError, match="load it into a loader built as then, or start anew") as caught:
        STATE.check(here)
    assert str(caught.value).splitlines()[1:] == [
        f"  source (the data set): {'a' * 32} in the state, {'c' * 32} here",
        f"  length (records per epoch): {2**48} in the state, 5 here",
    ]


def test_position_and_epoch_are_no_difference():
    STATE.check(replace(STATE, epoch=9, position=1))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"epoch": -1}, "epoch in the state is -1; it is a number of 0 or more"),
        ({"position": "3"}, "position in the state is '3'"),
        ({"length": True}, "length in the state is True"),
        ({"position": 11}, "the state stands at position 11 of 10"),
    ],
)
def test_numbers_of_a_state_are_checked(change, match):
    state = LoaderState(epoch=0, position=3, length=10, source="s", order="o").to_json()
    assert LoaderState.from_json(state).position == 3
    with pytest.raises(StateMismatchError, match=match):
        LoaderState.from_json({**state, **change})


GAPS = replace(STATE, position=40, length=50, missing=(4, 12, 36), step_size=4)


def test_state_with_gaps_survives_json():
    text = json.dumps(GAPS.to_json())
    assert json.loads(text) == GAPS.to_json()
    assert LoaderState.from_json(json.loads(text)) == GAPS


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"missing": 7}, "missing in the state is 7; it is a list of positions"),
        ({"missing": "48"}, "missing in the state is '48'; it is a list of positions"),
        ({"missing": None}, "missing in the state is None; it is a list of positions"),
        ({"missing": [12, 4]}, r"missing in the state is \[12, 4\]; they are rising positions before 40"),
        ({"missing": [4, 4]}, "they are rising positions before 40"),
        ({"missing": [4, "12"]}, "they are rising positions before 40"),
        ({"missing": [4.0]}, "they are rising positions before 40"),
        ({"missing": [True]}, "they are rising positions before 40"),
        ({"missing": [-4, 0]}, "they are rising positions before 40"),
        ({"missing": [4, 40]}, "they are rising positions before 40"),
        ({"missing": [4, 13]}, r"missing in the state is \[4, 13\]; they lie whole steps of 4 apart"),
        ({"step_size": 0}, "they lie whole steps of 0 apart"),
        ({"step_size": -4}, "step_size in the state is -4; it is a number of 0 or more"),
    ],
)
def test_gaps_of_a_state_are_checked(change, match):
    with pytest.raises(StateMismatchError, match=match):
        LoaderState.from_json({**GAPS.to_json(), **change})


def test_gaps_are_of_one_step_size():
    with pytest.raises(StateMismatchError) as caught:
        GAPS.check(replace(GAPS, step_size=8))
    assert caught.value.differences == (
        "step_size (rows of all ranks a step, which a state of in_order=False needs): 4 in the state, 8 here",
    )


def test_a_source_is_identified_by_what_it_says_or_by_its_class_and_length():
    assert identify(Identified("my data")) == "my data"
    assert identify([1, 2, 3]) == identify([4, 5, 6]) == digest("list", 3)
    assert len({identify(value) for value in ([1], [1, 2], (1,))}) == 3
