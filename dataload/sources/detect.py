"""Which format a file is in, by its first bytes. Pure (no I/O)."""

from __future__ import annotations

from dataload.codecs.npy import MAGIC, npy_layout
from dataload.errors import CorruptFileError

__all__ = ["HEAD_SIZE", "describe_head", "detect"]

HEAD_SIZE = 512
"""Bytes that `detect` wants to see."""

# A Riegeli file opens with a block header and the chunk that is its signature, the same in every file.
_RIEGELI_SIGNATURE = bytes.fromhex("83af70d10d884a3f")
_LMDB_MAGIC = 0xBEEFC0DE.to_bytes(4, "little")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


def detect(head: bytes) -> str | None:
    """Name of the format that a file starting with `head` is in, or None.

    LMDB files are all called ``"lmdb"``; whether one holds TorchRecord's sub-databases stands further in.
    """
    if head.startswith(b"GS\0"):
        return "syrah"
    if head.startswith(_RIEGELI_SIGNATURE):
        return "array_record"
    if _LMDB_MAGIC in (
        head[16:20],
        head[24:28],
    ):  # behind a page header of 16 or, on 32-bit page numbers, 24 bytes
        return "lmdb"
    if _is_tar_header(head):
        return "tar"
    if _is_npy_of_tokens(head):
        return "tokens"
    return None


def _is_npy_of_tokens(head: bytes) -> bool:
    """Integers in one dimension; other arrays are no data set."""
    try:
        layout = npy_layout(head)
    except CorruptFileError:
        return False
    return len(layout.shape) == 1 and layout.dtype.kind in "iu"


def _is_tar_header(head: bytes) -> bool:
    """The checksum of the first header fits; v7 archives have no magic."""
    if len(head) < 512 or not any(head):
        return False
    try:
        stated = int(head[148:156].strip(b" \0") or b"x", 8)
    except ValueError:
        return False
    return stated == sum(head[:512]) - sum(head[148:156]) + 8 * ord(" ")


def describe_head(head: bytes) -> str:
    """What stands at byte 0, for a message."""
    if not head:
        return "the file is empty"
    if head.startswith(MAGIC):
        return "it is a .npy file, of something else than integers in one dimension"
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            return f"byte 0 has the magic of {name}: decompress it first, compressed files have no random access"
    return f"byte 0 has {head[:8]!r}"
