"""Path and URL arithmetic. Pure (no I/O)."""

import glob
import os
import re
from collections.abc import Iterable
from os import PathLike, fspath
from typing import Any, Protocol, runtime_checkable
from urllib.parse import unquote

from dataload.errors import ConfigError, CorruptFileError

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_PLAIN = re.compile(r"\w[\w.=,+-]*+(?:/\w[\w.=,+-]*+)*+")
_PLACE = re.compile(r"/|[a-z]:|[a-z][\w+.-]*:/|(file|https?|s3|gs|az|memory|tfds|hf|pipe):", re.IGNORECASE)
_UNFIT = re.compile(r"[\0-\x1f\x7f\ud800-\udc7f\udd00-\udfff]"), re.compile(r"[\0-\x1f\x7f\ud800-\udfff]")  # in URLs
_LONGEST_NAME = 4096
_NO_NAMES = ("", ".", "..")
_BROKEN = re.compile(r"(?:https?|s3|gs|az|abfss?|sftp|hdfs|file|memory|hf):/(?!/)", re.IGNORECASE)
_HUB = re.compile(r"(hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?)(?:/(.*))?", re.IGNORECASE)


def literal_pattern(path: str) -> str:
    """Return a pattern that matches this path only."""
    return glob.escape(path)


def encoded_paths(paths: Iterable[str]) -> bytes:
    """Return local paths for the core, which are separated by zero bytes."""
    return os.fsencode("\0".join(paths))


def is_url(path: str) -> bool:
    """Return whether `path` is a URL; ConfigError if it has no host, or lost a slash in `pathlib`."""
    if ":/" not in path:  # most paths; a data set may have thousands
        return False
    if path.endswith("://") and _SCHEME.fullmatch(path):
        raise nameless_error(path)
    if _BROKEN.match(path):
        raise ConfigError(f"{path} was a URL, and pathlib.Path has changed it: pass a str", key="paths", value=path)
    return _SCHEME.match(path) is not None


def is_web_url(path: str) -> bool:
    """Return whether `path` is on a web server, which lists no files and cannot refuse to replace one."""
    return path.lower().startswith(("http://", "https://"))


def is_hub_url(path: str) -> bool:
    return path.lower().startswith("hf://")


def split_hub_url(url: str) -> tuple[str, str, str, str]:
    """Split a URL of the Hugging Face Hub into the URL of the data set, its name, the revision and the path."""
    found = _HUB.fullmatch(url)
    if found is None:
        message = "expected hf://datasets/ORG/NAME[@REVISION]/PATH, as only data sets of the hub are read"
        raise ConfigError(f"{url}: {message}", key="paths", value=url)
    base, name, revision, path = found.groups()
    return base, name, unquote(revision or "main"), (path or "").strip("/")


def nameless_error(base: str) -> ConfigError:
    named = "server" if is_web_url(base) else "bucket"
    return ConfigError(f"the URL {base} names no {named}: expected {base}NAME/PATH", key="paths", value=base)


def local_path(path: str) -> str:
    if path[:7].lower() != "file://":
        return path
    host, slash, rest = path[7:].partition("/")
    return f"{slash}{unquote(rest)}" if host in ("", "localhost") else path


def base_name(path: str) -> str:
    if is_url(path):
        return path.rstrip("/").rpartition("/")[2]
    name = path.rpartition("/")[2]
    if os.sep == "/" and name not in _NO_NAMES:
        return name
    return os.path.basename(os.path.normpath(path))


def parent(path: str) -> str:
    if is_url(path):
        return path.rstrip("/").rpartition("/")[0]
    return os.path.dirname(path) or "."


def absolute(path: str) -> str:
    return path if is_url(path) else os.path.abspath(path)


def join(directory: str, name: str) -> str:
    return f"{directory.rstrip('/')}/{name}" if is_url(directory) else os.path.join(directory, name)


def are_plain(names: str) -> bool:
    """Return whether names joined by ``/`` have only letters, digits and safe punctuation."""
    return _PLAIN.fullmatch(names) is not None


def leads_elsewhere(name: Any, *, in_url: bool = False) -> str:
    """Return why `name`, found in a file, is not a file below that file's directory; "" if it is. Never expanded."""
    if type(name) is str and len(name) <= _LONGEST_NAME and are_plain(name):
        return ""
    shown = re.sub(r"//[^/]*@", "//", str(name).partition("?")[0])[:80]  # a URL may hold secrets
    reason = f"{shown!r} is not the name of a file below this directory"
    if type(name) is not str or not 0 < len(name) <= _LONGEST_NAME:
        return reason
    plain = unquote(name)  # as in the paths of http://
    if "\\" in plain or _PLACE.match(plain) or not {"", ".", ".."}.isdisjoint(plain.split("/")):
        return reason
    return reason if _UNFIT[in_url].search(plain) or (in_url and "?" in name) else ""


def named_files(file: str, names: Iterable[Any], directory: str | None = None) -> list[str]:
    """Return the paths of `names` found in `file`, in `directory` or beside it; CorruptFileError if one is not."""
    directory, found = directory or parent(file), list[str]()
    for name in names:
        if reason := leads_elsewhere(name, in_url=is_url(directory)):
            message = f"it must not name this file: {reason}. To open files elsewhere, list their paths"
            raise CorruptFileError(message, path=file)
        found.append(join(directory, name))
    return found


def has_wildcards(path: str) -> bool:
    return glob.has_magic(path)


@runtime_checkable
class FileInstruction(Protocol):
    """Part of a file, as TensorFlow Datasets and Grain describe it; `examples_in_shard` is ignored."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int


def as_path(path: Any) -> str:
    """Return a path, with the home directory for ``~``, or a `FileInstruction`, as a slice; others are a TypeError."""
    if isinstance(path, (str, PathLike)) and isinstance(text := fspath(path), str):
        if not text or "\0" in text:
            raise ConfigError(f"{text!r} is not a path", key="paths", value=path)
        return os.path.expanduser(text)
    if not isinstance(path, FileInstruction):
        raise TypeError(f"a path must be text or a path object, got {path!r} ({type(path).__name__})")
    if path.skip < 0 or path.take < 0:
        raise ConfigError(
            f"{path.filename}: skip={path.skip}, take={path.take}: neither may be negative", key="paths", value=path
        )
    return f"{fspath(path.filename)}[{path.skip}:{path.skip + path.take}]"
