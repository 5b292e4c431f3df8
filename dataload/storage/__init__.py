"""Storage of bytes: sources and the loader read and write files only through this package.

A backend implements `Storage`; `storage_of` selects it by path: local files, or URLs.
"""

from dataload.storage.local.files import LocalFile, LocalStorage
from dataload.storage.local.folders import Listing, list_folder, read_files
from dataload.storage.local.parts import Part
from dataload.storage.local.reopened import FileIdentity
from dataload.storage.paths import absolute, base_name, has_wildcards, is_url, join, local_path, named_files, parent
from dataload.storage.records import RecordFile, reading_tables
from dataload.storage.remote.settings import Remote, RemoteOptions
from dataload.storage.storage import LeasedFile, Storage, read_limited, storage_of, unchanged

__all__ = [
    "FileIdentity",
    "LeasedFile",
    "Listing",
    "LocalFile",
    "LocalStorage",
    "Part",
    "RecordFile",
    "Remote",
    "RemoteOptions",
    "Storage",
    "absolute",
    "base_name",
    "has_wildcards",
    "is_url",
    "join",
    "list_folder",
    "local_path",
    "named_files",
    "parent",
    "read_files",
    "read_limited",
    "reading_tables",
    "storage_of",
    "unchanged",
]
