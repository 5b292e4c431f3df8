"""States as JSON: what comes back, what is refused, and what a difference is called."""

from dataclasses import dataclass, replace

import pytest

from dataload.errors import StateMismatchError
from dataload.loader.state import LoaderState, upgrade
from dataload.streams.state import MultiStreamState

STATE = LoaderState(epoch=3, position=2**47, length=2**48, source="a" * 32, order="b" * 32)


GAPS = replace(STATE, position=40, length=50, missing=(4, 12, 36), step_size=4)
SMALL = LoaderState(epoch=0, position=3, length=10, source="s", order="o")
KINDS = pytest.mark.parametrize("kind", [LoaderState, MultiStreamState])


@KINDS
@pytest.mark.parametrize(
    ("version", "message"),
    [
        (99, r"saved by a newer release .*: update dataload.*\n  version: 99 in"),
        *(
            (wrong, r"this is not a state of a \w*Loader, but .*\n  version: .* in the state")
            for wrong in (None, 0, -1, True, "1", 1.0)
        ),
    ],
)
def test_a_state_of_a_newer_release_or_without_a_version_says_so(kind, version, message):
    with pytest.raises(StateMismatchError, match=message):
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


RISING = "must be rising positions before 40"


@pytest.mark.parametrize(
    ("state", "change", "match"),
    [
        (SMALL, {"epoch": -1}, "epoch in the state must be an integer >= 0 and < 2.*62, found -1"),
        (SMALL, {"epoch": 1 << 62}, "epoch in the state must be an integer >= 0 and < 2.*62, found 46116860184"),
        (SMALL, {"position": "3"}, "position in the state must be .* found '3'"),
        (SMALL, {"length": True}, "length in the state must be .* found True"),
        (SMALL, {"position": 11}, "the state is at position 11 of 10"),
        (GAPS, {"missing": 7}, "missing in the state must be a list of positions, found 7"),
        (GAPS, {"missing": "48"}, "missing .* must be a list of positions, found '48'"),
        (GAPS, {"missing": None}, "missing .* must be a list of positions, found None"),
        (GAPS, {"missing": [12, 4]}, rf"{RISING}, found \[12, 4\]"),
        (GAPS, {"missing": [4, 4]}, RISING),
        (GAPS, {"missing": [4, "12"]}, RISING),
        (GAPS, {"missing": [4.0]}, RISING),
        (GAPS, {"missing": [True]}, RISING),
        (GAPS, {"missing": [-4, 0]}, RISING),
        (GAPS, {"missing": [4, 40]}, RISING),
        (GAPS, {"missing": [4, 13]}, r"positions missing in the state must be multiples of 4 apart, found \[4, 13\]"),
        (GAPS, {"step_size": 0}, "multiples of 0 apart"),
        (GAPS, {"step_size": -4}, "step_size in the state must be an integer >= 0 and < 2.*62, found -4"),
    ],
)
def test_numbers_of_a_state_are_checked(state, change, match):
    with pytest.raises(StateMismatchError, match=match):
        LoaderState.from_json({**state.to_json(), **change})


@pytest.mark.parametrize(
    ("state", "change"),
    [
        (SMALL, {"position": 10}),
        (SMALL, {"position": 0, "length": 0}),
        (SMALL, {"epoch": (1 << 62) - 1}),
        (GAPS, {"missing": [0, 36]}),
        (GAPS, {"missing": [39]}),
        (GAPS, {"missing": [], "step_size": 0}),
    ],
)
def test_states_at_the_limits_are_loaded(state, change):
    loaded = LoaderState.from_json({**state.to_json(), **change}).to_json()
    assert {name: loaded[name] for name in change} == change


def test_a_dict_that_is_not_a_state_is_told_by_its_keys():
    for keys, told in (("", r"\(none\)$"), ("abcde", "a, b, c, d, e$"), ("abcdefg", r"a, b, c, d, e \(and 2 more\)$")):
        with pytest.raises(StateMismatchError, match=rf"(?m)not a state of a Loader, but a dict with the keys {told}"):
            LoaderState.from_json(dict.fromkeys(keys))
