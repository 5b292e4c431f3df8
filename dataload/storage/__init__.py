"""Storage of bytes: sources and the loader read and write files only through this package.

A backend implements `Storage`; `storage_of` selects it by path. Local files are the only backend so far.
"""

from dataload.storage.local.files import LocalFile, LocalStorage
from dataload.storage.local.parts import Part
from dataload.storage.local.reopened import FileIdentity
from dataload.storage.paths import absolute, base_name, join, parent
from dataload.storage.records import RecordFile
from dataload.storage.storage import Storage, storage_of

__all__ = [
    "FileIdentity",
    "LocalFile",
    "LocalStorage",
    "Part",
    "RecordFile",
    "Storage",
    "absolute",
    "base_name",
    "join",
    "parent",
    "storage_of",
]
