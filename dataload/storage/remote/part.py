"""Objects that are written to a local file first, and uploaded when they are complete."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress

from dataload.storage.local.parts import Part, exists_error, write_errors
from dataload.storage.paths import base_name
from dataload.storage.remote.client import client_of
from dataload.storage.remote.settings import ObjectVersion, Remote, parse_bytes
from dataload.storage.table_cache import node_folder

LARGEST_PUT = 64 << 20
"""Most bytes of an object that is written by one request, which alone can demand that nothing is replaced."""

_SMALLEST_PART, _MOST_PARTS = 5 << 20, 9_000  # of an upload in parts; S3 takes at most 10,000


class RemotePart(Part):
    """A file or directory that `publish` uploads; until then in the node's cache, or a temporary folder. See `Part`."""

    def __init__(self, url: str, remote: Remote, *, overwrite: bool) -> None:
        self._client, self._key = client_of(url, remote)
        name = hashlib.blake2b(url.encode(), digest_size=10).hexdigest()
        folder = node_folder(remote, "uploads", name)
        if folder is None:
            with write_errors(tempfile.gettempdir()):
                folder = tempfile.mkdtemp(prefix="dataload-")
        super().__init__(os.path.join(folder, base_name(url)), overwrite=True)
        self.path: str = url
        self._overwrite, self._remote = overwrite, remote

    def publish(self, *, durable: bool = True) -> None:  # noqa: ARG002 - an object that exists is durable
        """Upload the temporary, each file atomically."""
        names = sorted(os.listdir(self.temporary)) if os.path.isdir(self.temporary) else [""]
        for name in names:
            url, key = (f"{part}/{name}".rstrip("/") for part in (self.path, self._key))
            self._remote.listings.pop(url.rpartition("/")[0], None)
            self._remote.versions.pop(url, None)
            file = os.path.join(self.temporary, name).rstrip("/")
            try:
                version = self._upload(url, key, file)
            except FileExistsError:
                raise exists_error(url) from None
            if version is not None:
                self._remote.versions[url] = version
        self.abort()

    def _upload(self, url: str, key: str, path: str) -> ObjectVersion | None:
        size = os.path.getsize(path)
        if size <= LARGEST_PUT:
            with open(path, "rb") as file:
                return self._client.put(url, key, file.read(), "overwrite" if self._overwrite else "create")[0]
        given = parse_bytes("part_bytes", self._remote.options.part_bytes)
        part = max(_SMALLEST_PART, given, -(-size // _MOST_PARTS))

        def parts() -> Iterator[bytes]:
            with open(path, "rb") as file:
                while data := file.read(part):
                    yield data

        return self._client.put_parts(url, key, parts, part, overwrite=self._overwrite)

    def abort(self) -> None:
        super().abort()
        with suppress(OSError):  # another part for this URL is in it, or it is gone
            os.rmdir(self.directory)
