"""References from a config to functions, as ``"package.module:function"``, and to arrays in .npy files."""

import importlib
import importlib.util
from typing import Any

from dataload.codecs.npz import parse_npy
from dataload.errors import ConfigError, CorruptFileError, closest, message_of
from dataload.storage.local.record_files import open_regular
from dataload.types import Array

NPY_PATTERN = r"\.npy$"
REFERENCE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"


def find_module(name: str) -> bool:
    """Return whether there is a module of that name to import; its parent packages are imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    except Exception:  # of a parent package: importing it says what is wrong
        return True


def resolve_reference(reference: str, key: str) -> Any:
    """Import the object that ``"package.module:name"``, the value of the setting `key`, names."""
    module_name, _, path = reference.partition(":")
    if not path:
        raise ConfigError(f"{key} is {reference!r}: expected 'module:function'", key=key, value=reference)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        reason = f"importing {module_name!r} failed ({error}); is it installed, or on PYTHONPATH?"
        if not isinstance(error, ImportError):  # the module is there, and its code raises
            reason = f"importing {module_name!r} raised {message_of(error)}"
        raise ConfigError(f"{key} is {reference!r}: {reason}", key=key, value=reference) from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            known = [known for known in getattr(found, "__dict__", ()) if not known.startswith("_")]
            reason = f"{module_name} has no {name!r}: {closest(name, known)}"
            raise ConfigError(f"{key} is {reference!r}: {reason}", key=key, value=reference) from None
    return found


def read_array(path: str, key: str) -> Array:
    """Read a one-dimensional array from the .npy file that the setting `key` names."""
    try:
        with open(path, "rb", opener=open_regular) as stream:
            array = parse_npy(stream.read())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", key=key, value=path) from error
    except CorruptFileError as error:
        raise ConfigError(f"{path} is not a .npy array: {error}", key=key, value=path) from error
    if array.ndim != 1:
        raise ConfigError(f"{path} holds an array of shape {array.shape}: expected one dimension", key=key, value=path)
    return array
