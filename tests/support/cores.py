"""The cores that are there, numpy's and the compiled one, and what tests of both need."""

import importlib.util

import numpy as np
import pytest

from dataload.storage import _core_numpy

if importlib.util.find_spec("dataload.storage._core_c"):
    from dataload.storage import _core_c

    CORES = [_core_numpy, _core_c]
else:
    _core_c, CORES = None, [_core_numpy]

each = pytest.mark.parametrize("one", CORES, ids=lambda module: module.__name__.rpartition(".")[2])
compiled = pytest.mark.skipif(len(CORES) == 1, reason="the core is not compiled")


def numbers(*values):
    return np.array(values, np.int64)


def outcome(function, *arguments):
    """Return what a function returns, or the type and text of what it raises."""
    try:
        return function(*arguments)
    except (ValueError, LookupError, OverflowError) as error:
        return type(error), str(error)


def check_allocations(function, arguments, allocations, more=10):
    """Each allocation of a call may fail: that is a MemoryError, and the next call succeeds."""
    memory, failed = pytest.importorskip("_testcapi"), 0
    for failing in range(allocations + more):
        memory.set_nomemory(failing, failing + 1)
        try:
            function(*arguments)
        except MemoryError:
            failed += 1
        finally:
            memory.remove_mem_hooks()
    assert failed >= allocations, function
    function(*arguments)
