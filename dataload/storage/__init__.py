"""Storage of bytes. Sources and the loader read and write files only through this package."""

from dataload.storage.backend import LeasedFile, Storage, files_below, read_limited, storage_of, unchanged
from dataload.storage.local.atomic import AtomicFile
from dataload.storage.local.files import LocalFile, LocalStorage
from dataload.storage.local.folders import Listing, list_folder, list_names, read_files
from dataload.storage.local.record_files import FileIdentity
from dataload.storage.paths import absolute, base_name, has_wildcards, is_url, join, local_path, named_files, parent
from dataload.storage.record_file import RecordFile, reading_tables
from dataload.storage.remote.settings import Remote, RemoteOptions

__all__ = [
    "AtomicFile",
    "FileIdentity",
    "LeasedFile",
    "Listing",
    "LocalFile",
    "LocalStorage",
    "RecordFile",
    "Remote",
    "RemoteOptions",
    "Storage",
    "absolute",
    "base_name",
    "files_below",
    "has_wildcards",
    "is_url",
    "join",
    "list_folder",
    "list_names",
    "local_path",
    "named_files",
    "parent",
    "read_files",
    "read_limited",
    "reading_tables",
    "storage_of",
    "unchanged",
]
