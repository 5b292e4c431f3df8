"""The names in a directory of an object store, a bounded number of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from dataload.errors import StoreError
from dataload.storage.remote.settings import ObjectVersion

T = TypeVar("T")

_PAGE = 1000  # names that stores send at once
_MOST_NAMES = 1_000_000
_LONGEST = 1024  # characters of a key or an ETag, in any store
_REMEDY = "write a manifest (`dataload index --manifest`), or name the shards: {000..127}"


async def list_directory(
    obstore: Any, store: Any, url: str, key: str, *, page_seconds: float, group_seconds: float
) -> tuple[list[str], list[tuple[str, ObjectVersion]]]:
    """Return the names of directories and of objects, with their versions, in a directory.

    Each page has to arrive in `page_seconds`. If there are directories inside, the list has to end in `group_seconds`
    more than the pages before took.
    """
    found: dict[str, ObjectVersion] = {}
    begun = time.monotonic()
    depth = key.count("/") + 1 if key else 0
    pages: AsyncIterator[Any] = aiter(obstore.list(store, key or None, chunk_size=_PAGE))
    while page := await _in_time(anext(pages, None), url, page_seconds):
        for meta in page:
            if max(len(meta["path"]), len(meta["e_tag"] or "")) > _LONGEST:
                raise StoreError(
                    f"cannot list {url}: the store gives a name or an ETag of more than {_LONGEST} characters, which "
                    "no object has",
                    path=url,
                )
            name, *inner = meta["path"].split("/")[depth:] or [""]
            if inner or not meta["size"]:  # a directory, or the mark of one
                # Only a list that groups names skips what is inside. It shows no pages, so time alone bounds it.
                seconds = group_seconds + time.monotonic() - begun
                listing = await _in_time(obstore.list_with_delimiter_async(store, key or None), url, seconds)
                return _grouped(listing, url, key)
            if name in found:
                raise StoreError(f"cannot list {url}: the store repeats names, such as {name}", path=url)
            found[name] = ObjectVersion.of(meta, url)
        if len(found) > _MOST_NAMES:
            raise StoreError(f"cannot list {url}: it has more than {_MOST_NAMES:,} names; {_REMEDY}", path=url)
    return [], [*found.items()]


def _grouped(listing: Any, url: str, key: str) -> tuple[list[str], list[tuple[str, ObjectVersion]]]:
    folders = [name.rstrip("/").rpartition("/")[2] for name in listing["common_prefixes"]]
    objects = [meta for meta in listing["objects"] if meta["path"] != key]  # the mark of the directory itself
    return folders, [(meta["path"].rpartition("/")[2], ObjectVersion.of(meta, url)) for meta in objects]


async def _in_time(answer: Awaitable[T], url: str, seconds: float) -> T:
    import asyncio

    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise StoreError(
            f"cannot list {url}: the list has not ended after {seconds:.0f} s; raise the option timeout of remote, or "
            f"{_REMEDY}",
            path=url,
        ) from None
