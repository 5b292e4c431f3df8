"""reset_state, for whatever a model may carry."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest

from dataload.streams import reset_state

torch = pytest.importorskip("torch")

FIRST = np.array([True, False, True])
FLAGS = [FIRST, torch.from_numpy(FIRST), torch.tensor([1, 0, 1])]
NUMPY_DTYPES = [np.float32, np.float16, np.float64, np.int64, np.complex64]
TORCH_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.complex64]
STATES = [np.arange(6, dtype=dtype).reshape(3, 2) + 1 for dtype in NUMPY_DTYPES]
STATES += [(torch.arange(6).reshape(3, 2) + 1).to(dtype) for dtype in TORCH_DTYPES]
Pair = namedtuple("Pair", "h c")


@pytest.mark.parametrize("state", STATES, ids=lambda state: f"{type(state).__name__} {state.dtype}")
@pytest.mark.parametrize("flags", FLAGS, ids=["numpy", "bool", "int"])
def test_rows_that_begin_anew_get_the_initial_state(state, flags):
    found = reset_state(state, flags)
    assert found.tolist() == [[0, 0], [3, 4], [0, 0]]
    assert (type(found), found.dtype) == (type(state), state.dtype)
    assert getattr(found, "device", None) == getattr(state, "device", None)  # numpy 1 has none
    assert state.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert reset_state(state, flags, initial=7).tolist() == [[7, 7], [3, 4], [7, 7]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_mask_goes_to_the_device_of_the_state():
    state = torch.ones(3, 2, device="cuda", dtype=torch.float16)
    for flags in FLAGS[:2]:
        found = reset_state(state, flags)
        assert found.device == state.device
        assert found.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_states_inside_of_others_keep_their_kind():
    ones = np.ones((3, 1))
    state = {"layers": [Pair(ones, None), (ones, torch.ones(3, 2))], "deep": {"x": (ones,)}, "none": None}
    found = reset_state(state, FIRST)
    assert list(found) == ["layers", "deep", "none"]
    assert found["none"] is None
    (pair, couple) = found["layers"]
    assert (type(pair), pair.c, type(couple)) == (Pair, None, tuple)
    for reset in (pair.h, couple[0], couple[1][:, :1], found["deep"]["x"][0]):
        assert reset.tolist() == [[0], [1], [0]]
    assert reset_state(OrderedDict(a=ones), FIRST)["a"].tolist() == [[0], [1], [0]]
    assert reset_state(None, FIRST) is None
    assert reset_state((), FIRST) == ()


def test_an_initial_state_may_be_learned():
    initial = torch.tensor([[5.0, 6.0]], requires_grad=True)
    state = torch.ones(3, 2, requires_grad=True)
    found = reset_state(state, FIRST, initial=initial)
    assert found.tolist() == [[5, 6], [1, 1], [5, 6]]
    found.sum().backward()
    assert state.grad.tolist() == [[0, 0], [1, 1], [0, 0]]
    assert initial.grad.tolist() == [[2, 2]]
    kept = reset_state(state, np.zeros(3, bool))
    assert torch.equal(kept, state)
    kept.sum().backward()
    assert state.grad.tolist() == [[1, 1], [2, 2], [1, 1]]
