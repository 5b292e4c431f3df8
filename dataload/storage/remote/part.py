"""Objects that are written to a local file first, and uploaded when they are complete."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress

from dataload.errors import SourceError
from dataload.storage.local.parts import Part, exists_error
from dataload.storage.paths import base_name
from dataload.storage.remote.client import client_of
from dataload.storage.remote.settings import ObjectVersion, Remote, parse_bytes

LARGEST_PUT = 64 << 20
"""Most bytes of an object that is written by one request, which alone can demand that nothing is replaced."""

_SMALLEST_PART, _MOST_PARTS = 5 << 20, 9_000  # of an upload in parts; S3 takes at most 10,000


class RemotePart(Part):
    """A file or directory that is uploaded by `publish`; see `Part`.

    Args:
        url: Destination.
        remote: Its settings.
        directory: Where to keep the part; None for the system's directory for temporary files.
        overwrite: Replace what exists.
    """

    def __init__(self, url: str, remote: Remote, directory: str | None, *, overwrite: bool) -> None:
        self._client, self._key = client_of(url, remote)
        name = hashlib.blake2b(url.encode(), digest_size=10).hexdigest()
        folder = None if directory is None else os.path.join(directory, "uploads", name)
        try:
            if folder is None:
                folder = tempfile.mkdtemp(prefix="dataload-")
            os.makedirs(folder, 0o700, exist_ok=True)
        except OSError as error:
            raise SourceError(
                f"{folder or tempfile.gettempdir()}, where {url} is made, cannot be created: {error.strerror}", path=url
            ) from error
        super().__init__(os.path.join(folder, base_name(url)), overwrite=True)
        self.path: str = url
        self._overwrite, self._remote = overwrite, remote

    def publish(self, *, durable: bool = True) -> None:  # noqa: ARG002 - an object that exists is durable
        """Upload the temporary, each file atomically.

        Raises:
            ConfigError: The destination has come into existence since the part was created.
            SourceError: The upload failed.
        """
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
        """Delete what was not published. May be called twice."""
        super().abort()
        with suppress(OSError):  # another part for this URL is in it, or it is gone
            os.rmdir(self.directory)
