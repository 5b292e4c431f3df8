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
    "state", [{}, {"json": 3}, {"json": "{"}, {"json": "null"}, {"epoch": 1, "position": 2}, {1: 2, "a": 3}]
)
def test_a_state_of_something_else_is_refused(state):
    message = "this is not a state of a JsonState: expected a dict as JSON text under 'json', found "
    with pytest.raises(StateMismatchError, match=message):
        JsonState(Loader(RangeSource(9), batch_size=2)).load_state_dict(state)
