"""Description of a file's first bytes, for error messages. Pure (no I/O)."""

from dataload.codecs.npy import MAGIC

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


def describe_head(head: bytes) -> str:
    """Describe the first bytes of a file in an unknown format."""
    if not head:
        return "the file is empty"
    if head.startswith(MAGIC):
        return "it is a .npy file, but not a one-dimensional array of integers"
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            return f"byte 0 has the magic bytes of {name}: decompress it first, to allow random access"
    return f"byte 0 has {head[:8]!r}"
