from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest

from dataload.errors import StateMismatchError
from dataload.loader.state import LoaderState, upgrade
from dataload.streams.state import MultiStreamState

STATE = LoaderState(epoch=3, position=2**47, length=2**48, source="a" * 32, order="b" * 32)


def test_state_survives_json_in_less_than_a_kibibyte():
    text = json.dumps(STATE.to_json())
    assert len(text) < 1024
    assert LoaderState.from_json(json.loads(text)) == STATE


@pytest.mark.parametrize("kind", [LoaderState, MultiStreamState])
def test_a_state_of_a_newer_release_says_so(kind):
    with pytest.raises(StateMismatchError, match=r"saved by a newer release .*: update dataload.*\n  version: 99 in"):
        kind.from_json({**STATE.to_json(), "version": 99})


@pytest.mark.parametrize("kind", [LoaderState, MultiStreamState])
@pytest.mark.parametrize("version", [None, 0, -1, True, "1", 1.0])
def test_a_state_without_a_version_is_none(kind, version):
    with pytest.raises(StateMismatchError, match=r"this is not a state of a \w*Loader\n  version: .* in the state"):
        kind.from_json({**STATE.to_json(), "version": version})


def test_states_are_migrated_version_by_version():
    @dataclass
    class Kind:
        a: int
        b: int
        version: int = 3

    migrations = (lambda state: {**state, "b": 1}, lambda state: {**state, "a": state["a"] + state["b"]})
    for version, state in enumerate([{"a": 5}, {"a": 5, "b": 2}, {"a": 5, "b": 2}], start=1):
        found = upgrade({**state, "version": version}, Kind, "Loader", migrations)
        assert found == {"a": (6, 7, 5)[version - 1], "b": (1, 2, 2)[version - 1], "version": 3}
        assert "version" not in state


@pytest.mark.parametrize("state", [0, None, [], "text"])
def test_state_that_is_no_dict_is_refused(state):
    for kind in (LoaderState, MultiStreamState):
        with pytest.raises(StateMismatchError, match=f"a .*Loader is a dict, found {type(state).__name__}"):
            kind.from_json(state)


def test_state_with_missing_or_foreign_keys_is_refused():
    saved = STATE.to_json()
    del saved["epoch"]
    with pytest.raises(StateMismatchError, match="not a state of a Loader: missing or unknown keys: epoch, steps"):
        LoaderState.from_json({**saved, "steps": 3})


def test_state_of_other_data_has_one_line_per_difference():
    here = replace(STATE, source="c" * 32, length=5, epoch=0, position=0)
    with pytest.raises(StateMismatchError, match="into a loader with the same settings, or start over\n") as caught:
        STATE.check(here)
    assert str(caught.value).splitlines()[1:] == [
        f"  source (the data set): {'a' * 32} in the state, {'c' * 32} here",
        f"  length (records per epoch): {2**48} in the state, 5 here",
    ]


def test_another_order_is_shown_by_its_settings():
    saved = replace(STATE, settings="GlobalShuffle(length=9, seed=0)")
    with pytest.raises(StateMismatchError) as caught:
        saved.check(replace(saved, order="c" * 32, settings="GlobalShuffle(length=9, seed=1)"))
    shown = "GlobalShuffle(length=9, seed=0) in the state, GlobalShuffle(length=9, seed=1) here"
    assert str(caught.value).splitlines()[1:] == [f"  order (the sampler or its seed): {shown}"]
    for settings in ("", saved.settings):  # of an older release; or the difference is in what is left out
        with pytest.raises(StateMismatchError, match=f"seed\\): {'b' * 32} in the state, {'c' * 32} here"):
            replace(saved, settings=settings).check(replace(saved, order="c" * 32))
    with pytest.raises(StateMismatchError, match="settings in the state must be text, found 3"):
        LoaderState.from_json({**STATE.to_json(), "settings": 3})


def test_position_and_epoch_are_no_difference():
    STATE.check(replace(STATE, epoch=9, position=1))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"epoch": -1}, "epoch in the state must be an integer >= 0 and < 2.*62, found -1"),
        ({"epoch": 1 << 62}, "epoch in the state must be an integer >= 0 and < 2.*62, found 4611686018427387904"),
        ({"position": "3"}, "position in the state must be .* found '3'"),
        ({"length": True}, "length in the state must be .* found True"),
        ({"position": 11}, "the state is at position 11 of 10"),
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
        ({"missing": 7}, "missing in the state must be a list of positions, found 7"),
        ({"missing": "48"}, "missing .* must be a list of positions, found '48'"),
        ({"missing": None}, "missing .* must be a list of positions, found None"),
        ({"missing": [12, 4]}, r"must be rising positions before 40, found \[12, 4\]"),
        ({"missing": [4, 4]}, "must be rising positions before 40"),
        ({"missing": [4, "12"]}, "must be rising positions before 40"),
        ({"missing": [4.0]}, "must be rising positions before 40"),
        ({"missing": [True]}, "must be rising positions before 40"),
        ({"missing": [-4, 0]}, "must be rising positions before 40"),
        ({"missing": [4, 40]}, "must be rising positions before 40"),
        ({"missing": [4, 13]}, r"positions missing in the state must be multiples of 4 apart, found \[4, 13\]"),
        ({"step_size": 0}, "multiples of 0 apart"),
        ({"step_size": -4}, "step_size in the state must be an integer >= 0 and < 2.*62, found -4"),
    ],
)
def test_gaps_of_a_state_are_checked(change, match):
    with pytest.raises(StateMismatchError, match=match):
        LoaderState.from_json({**GAPS.to_json(), **change})


def test_gaps_are_of_one_step_size():
    with pytest.raises(StateMismatchError) as caught:
        GAPS.check(replace(GAPS, step_size=8))
    (line,) = caught.value.differences
    assert line.startswith("step_size (rows of all ranks per step, which must be the same for a state of in_order=F")
    assert line.endswith("4 in the state, 8 here")
