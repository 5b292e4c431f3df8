"""The objects and ranges that requests name. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from dataload.errors import ConfigError

GAP = 1 << 16
"""Bytes between two ranges that are fetched too, because another request would take longer."""

SCHEMES = ("s3", "gs", "az", "http", "https", "memory")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of one object, at most one request; `at` is their offset for the receiver."""

    start: int
    stop: int
    at: int


def cut(starts: Iterable[int], stops: Iterable[int], most: int, first: int = 0) -> list[Piece]:
    """Cut ranges into pieces of at most `most` bytes, to be received one after another from `first`."""
    pieces: list[Piece] = []
    for start, stop in zip(starts, stops, strict=True):
        for begin in range(start, stop, most):
            end = min(begin + most, stop)
            pieces.append(Piece(begin, end, first))
            first += end - begin
    return pieces


def split_url(url: str) -> tuple[str, str]:
    """Return the URL of the store and the key of the object in it. Errors do not repeat what may be a secret."""
    parts = urlsplit(url, allow_fragments=False)
    scheme = parts.scheme.lower()
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in (*SCHEMES, "file"))
        raise ConfigError(f"{url}: URLs begin with one of {known}", key="paths", value=url)
    web = scheme in ("http", "https")
    if "@" in parts.netloc or (web and (parts.query or "#" in url)):
        raise ConfigError(
            f"a {scheme}:// URL has a user, a password, a query or a fragment, which may be secret: leave it out, and "
            "give credentials in storage_options or the environment (%23 is a # in a name)",
            key="paths",
        )
    query = f"?{parts.query}" if parts.query else ""
    key = f"{parts.path}{query}".strip("/")
    return f"{scheme}://{parts.netloc}", unquote(key) if web else key
