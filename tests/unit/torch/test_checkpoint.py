"""States as single values of a checkpoint."""

import pytest

from dataload import Loader, RangeSource, StateMismatchError

pytest.importorskip("torch")

from dataload.torch import JsonState


def test_the_state_is_one_text():
    loader, resumed = (Loader(RangeSource(9), batch_size=2) for _ in range(2))
    next(iter(loader))
    (text,) = JsonState(loader).state_dict().values()
    assert isinstance(text, str)
    JsonState(resumed).load_state_dict({"json": text})
    assert resumed.state_dict() == loader.state_dict()
    assert repr(JsonState(loader)) == f"JsonState({loader!r})"


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({}, r"the keys \[\]"),
        ({"json": 3}, "3"),
        ({"json": "{"}, "'{'"),
        ({"json": "null"}, "'null'"),
        ({"json": "x" * 200}, r"'x{59} \.\.\.\(122 characters\)\.\.\. x{19}'"),
        ({1: 2, "a": 3}, r"the keys \[1, 'a'\]"),
    ],
)
def test_a_state_of_something_else_is_refused(state, found):
    message = f"this is not a state of a JsonState: expected a dict as JSON text under 'json', found {found}$"
    with pytest.raises(StateMismatchError, match=message):
        JsonState(Loader(RangeSource(9), batch_size=2)).load_state_dict(state)
