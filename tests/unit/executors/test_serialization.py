"""Objects taken apart and put together are what they were."""

import importlib.util
import io
import pickle
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from bad_errors import Demanding, Holding

from dataload.executors.serialization import check_work, put_together, sendable, take_apart

sys.path.append(str(Path(__file__).parents[2] / "children"))
import works

VALUES = works.values()


@pytest.mark.parametrize("name", VALUES)
def test_round_trip(name):
    parts = [bytearray(part) for part in take_apart(VALUES[name])]
    works.assert_same(put_together(parts), VALUES[name])


def test_large_arrays_are_not_copied_and_small_ones_keep_nothing():
    large, small = np.arange(10_000), np.arange(10)
    parts = take_apart({"large": large, "small": small})
    assert [part.nbytes for part in parts[1:]] == [large.nbytes]
    assert np.shares_memory(np.frombuffer(parts[1], np.uint8), large)
    memory = [np.array(part) for part in parts]
    found = put_together(memory)
    assert np.shares_memory(found["large"], memory[1])
    assert not any(np.shares_memory(found["small"], part) for part in memory)


def test_a_check_finds_what_cannot_be_pickled_and_copies_nothing():
    check_work(np.arange(10))
    check_work([b"x" * 100_000, np.zeros(1 << 20)])
    with pytest.raises(TypeError, match=r"cannot pickle '.*TextIOWrapper'"):
        check_work([io.TextIOWrapper(io.BytesIO())])


@pytest.mark.parametrize("error", [ValueError("why"), Holding(), Demanding(1, "why")])
def test_an_error_is_sent_with_its_notes_and_its_traceback(error):
    error.add_note("of record 3")
    sent = sendable(error, "worker 2")
    assert (type(sent) is type(error), str(error) in str(sent)) == (type(error) is ValueError, True)
    noted, (own, traceback) = put_together(take_apart(sent)).__notes__, sent.__notes__
    assert noted == [own, traceback] == ["of record 3", traceback]
    assert traceback.startswith("The original traceback, in worker 2:\n")


def test_functions_that_workers_cannot_import_go_by_value():
    pytest.importorskip("cloudpickle")
    assert put_together(take_apart(lambda: 3, by_value=True))() == 3


def tensors():
    torch = pytest.importorskip("torch")
    base = torch.arange(60_000, dtype=torch.float32).reshape(2, 3, 100, 100)
    yield base
    yield base.to(memory_format=torch.channels_last)
    yield base.permute(3, 0, 2, 1)
    yield base[:, :, ::2, 5:]
    yield base.to(torch.bfloat16)
    yield base.to(torch.bfloat16).permute(1, 3, 0, 2)
    yield base.to(torch.complex64).conj()
    yield base.to(torch.bool)
    yield torch.zeros(2, 0, 3)
    yield torch.tensor(3.5)
    yield torch.tensor(2.5, dtype=torch.bfloat16)
    yield base[:1, :1, :1, :1].expand(4, 5, 1, 2)
    yield torch.eye(3).to_sparse()
    yield base.clone().requires_grad_()
    yield torch.nn.Parameter(base)


def test_tensors_are_as_they_were():
    torch = pytest.importorskip("torch")
    for tensor in tensors():
        found = put_together([bytearray(part) for part in take_apart({"t": tensor})])["t"]
        assert type(found) is type(tensor)
        assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
        assert torch.equal(found.to_dense(), tensor.to_dense())
        for layout in (torch.contiguous_format, torch.channels_last):
            if tensor.dim() == 4 and tensor.layout == torch.strided and tensor.is_contiguous(memory_format=layout):
                assert found.is_contiguous(memory_format=layout)


def test_what_cannot_be_imported_goes_by_value_and_the_rest_by_name(tmp_path, monkeypatch):
    pytest.importorskip("cloudpickle")

    class Local:
        def __init__(self, values):
            self.values = values

        @classmethod
        def make(cls):
            return cls(3)

    large, named = np.arange(10_000), works.Records(3)
    parts = take_apart(
        [Local(large), lambda x: (x, textwrap.dedent(" y"), named), works.Records, Local.make], by_value=True
    )
    assert [part.nbytes for part in parts[1:]] == [large.nbytes]
    local, function, by_name, method = put_together(parts)
    assert (local.values == large).all()
    assert function(1)[:2] == (1, "y")
    assert type(function(1)[2]) is by_name is works.Records
    assert type(method()) is type(local) is Local, "one class in one process"
    monkeypatch.setitem(sys.modules, "__main__", type(sys)("__main__"))
    sys.modules["__main__"].__file__ = __file__  # of a program
    Local.make.__func__.__module__ = Local.__init__.__module__ = Local.__module__ = "__main__"
    with pytest.raises((AttributeError, pickle.PicklingError), match="Local"):
        take_apart(Local(large))
    (tmp_path / "file").write_text("content")
    with (tmp_path / "file").open() as stream, pytest.raises(TypeError, match=r"pickle '.*TextIOWrapper'"):
        check_work([stream])


class Derived(works.Records):
    """Of another module than its base."""


def test_the_modules_of_work_are_those_of_classes_their_bases_and_functions():
    found = check_work([Derived(3), textwrap.dedent, np.float32(3)])
    assert found >= {__name__, "works", "textwrap", "numpy"}
    assert "json" not in found


def test_functions_of_a_session_need_cloudpickle(monkeypatch):
    def cell():
        pass

    monkeypatch.setitem(sys.modules, "__main__", type(sys)("__main__"))
    monkeypatch.setattr(cell, "__module__", "__main__")
    monkeypatch.setattr(cell, "__qualname__", "cell")
    monkeypatch.setattr(sys.modules["__main__"], "cell", cell, raising=False)
    pickle.dumps(cell)  # plain pickle finds it here, but a worker would not
    if importlib.util.find_spec("cloudpickle"):
        importlib.import_module("cloudpickle")
        assert put_together(take_apart(cell)) is not cell
        with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
            take_apart(lambda: 3)  # of a module
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(pickle.PicklingError, match=r"^cell is defined in a notebook or an interactive session$"):
        check_work(cell)
