"""Where the bytes of files are: in a folder, or in a ZIP archive."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

from dataload._util.fingerprint import digest
from dataload._util.limits import check_size
from dataload.errors import CorruptFileError, UnsupportedFormatError
from dataload.sources.folder.format import FolderOptions
from dataload.sources.folder.zip import read_members, unpack
from dataload.sources.versions import ends_of_file
from dataload.storage import Listing, RecordFile, is_url, join, list_folder, read_files, storage_of
from dataload.types import Int64Array

_MACOS_FOLDER = "__MACOSX"  # in which macOS packs attributes of files


class Files(Protocol):
    """The files of a data set, each with a number of its own, its value in `listing`."""

    listing: Listing

    def sizes(self, values: Int64Array) -> Int64Array:
        """Return the sizes of files in bytes, (n,) int64."""
        ...

    def identity(self, names: Sequence[str], values: Int64Array) -> str:
        """Return a hash that tells contents apart: of all if that is known, else of the ends of the given files."""
        ...

    def read(self, names: Sequence[str], values: Int64Array, indices: Int64Array) -> Sequence[bytes | memoryview]:
        """Return the content of files; `indices` are those of their records, for messages."""
        ...

    def ranges(self, values: Int64Array) -> tuple[Int64Array, Int64Array] | None:
        """Return offsets and lengths in bytes, (n,) int64, of what `read` reads of an archive; None for a folder."""
        ...

    def locate(self, name: str) -> tuple[str, str]:
        """Return the path of the file that has the bytes, and text for messages that tells which of its bytes."""
        ...

    def release(self) -> None:
        """Close what is open."""
        ...


class FolderFiles:
    """The files in a folder that are `wanted`, by relative path; their values are their sizes in bytes."""

    def __init__(self, root: str, wanted: Callable[[str], object], limit: int) -> None:
        self._root = root
        self._limit = limit
        self.listing: Listing
        self.listing, self._newest = list_folder(root, wanted)

    def sizes(self, values: Int64Array) -> Int64Array:
        return values

    def identity(self, names: Sequence[str], values: Int64Array) -> str:  # noqa: ARG002 - for archives
        return digest(*(ends_of_file(join(self._root, name), None) for name in names))

    def read(self, names: Sequence[str], values: Int64Array, indices: Int64Array) -> Sequence[bytes]:
        paths = [join(self._root, name) for name in names]
        sizes, records = values.tolist(), indices.tolist()
        for path, size, index in zip(paths, sizes, records, strict=True):
            check_size(size, self._limit, "the file", path=path, index=index)
        return read_files(paths, sizes, records, self._newest)

    def ranges(self, values: Int64Array) -> None:  # noqa: ARG002 - for archives
        return

    def locate(self, name: str) -> tuple[str, str]:
        return join(self._root, name), ""

    def release(self) -> None:
        """See `Files.release`."""


class ZipFiles:
    """The members of a ZIP archive that are `wanted`, by name; their values are their numbers."""

    def __init__(self, file: RecordFile, wanted: Callable[[str], object], limit: int) -> None:
        self._file = file
        self._limit = limit
        self._members = read_members(file.read, file.size, file.path)
        self.listing: dict[str, dict[str, int]] = {}
        for number, name in enumerate(self._members.names):
            if wanted(name) and not name.startswith((".", f"{_MACOS_FOLDER}/")) and "/." not in name:
                folder, _, base = name.rpartition("/")
                self.listing.setdefault(folder, {})[base] = number
        self._members.names.clear()  # the table has them

    def sizes(self, values: Int64Array) -> Int64Array:
        return self._members.sizes[values]

    def identity(self, names: Sequence[str], values: Int64Array) -> str:  # noqa: ARG002 - for folders
        return hashlib.blake2b(self._members.checksums.tobytes(), digest_size=16).hexdigest()

    def read(self, names: Sequence[str], values: Int64Array, indices: Int64Array) -> list[bytes | memoryview]:
        members, path = self._members, self._file.path
        starts, sizes = members.starts[values], members.sizes[values].tolist()
        for name, size, index in zip(names, sizes, indices.tolist(), strict=True):
            check_size(size, self._limit, f"the member {name!r}", path=path, index=index)
        contents = self._file.gather_ranges(starts, members.spans[values]).views()
        unpacked: list[bytes | memoryview] = []
        for row, (value, content) in enumerate(zip(values.tolist(), contents, strict=True)):
            stored, checksum = int(members.stored[value]), int(members.checksums[value])
            try:
                deflated = bool(members.deflated[value])
                unpacked.append(unpack(content, stored, sizes[row], checksum, deflated=deflated))
            except CorruptFileError as error:
                message = f"the member {names[row]!r}: {error}"
                raise CorruptFileError(message, path=path, offset=int(starts[row]), index=int(indices[row])) from error
        return unpacked

    def ranges(self, values: Int64Array) -> tuple[Int64Array, Int64Array]:
        return self._members.starts[values], self._members.spans[values]

    def locate(self, name: str) -> tuple[str, str]:
        return self._file.path, f"the member {name!r}: "

    def release(self) -> None:
        self._file.release()


def open_files(root: str, wanted: Callable[[str], object], options: FolderOptions) -> Files:
    """Return the files of a folder or an archive; a folder at a URL is refused."""
    storage = storage_of(root, options.place)
    if not storage.is_directory(root):
        file = storage.map(root, mapped=options.map)
        return ZipFiles(file, wanted, options.max_record_bytes)
    if is_url(root):
        message = f"{root} is a folder of single files at a URL, each of which would be a request: convert a copy of it"
        raise UnsupportedFormatError(
            f"{message} (`dataload convert`), or pack it as a .zip, and upload that", path=root
        )
    return FolderFiles(root, wanted, options.max_record_bytes)
