"""Small files and archives, and their comparison, for tests of formats."""

import io
import tarfile
from pathlib import Path

import numpy as np
import PIL.Image
from hypothesis import strategies as st

from dataload.testing.compare import difference

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=8,
)
"""Any value that JSON can hold."""


def npy(array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def image(pixels, kind="PNG") -> bytes:
    """Encode pixels, or those that a number draws."""
    if isinstance(pixels, int):
        pixels = np.random.default_rng(pixels).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    stream = io.BytesIO()
    PIL.Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def clip(frames=20, rate=8_000, kind="WAV") -> bytes:
    """Encode sound of one channel."""
    import soundfile  # not where only images are tested

    stream = io.BytesIO()
    soundfile.write(stream, np.linspace(-0.5, 0.5, frames, dtype=np.float32), rate, format=kind)
    return stream.getvalue()


def pack(path: Path, files, kind=tarfile.USTAR_FORMAT) -> Path:
    """Write an archive of files: a mapping, or pairs of name and data."""
    with tarfile.open(path, "w", format=kind, encoding="utf-8") as tar:
        for name, data in files.items() if isinstance(files, dict) else files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_tokens(path: Path, tokens, dtype="<u2") -> Path:
    """Raw, or by numpy where the name says so."""
    array = np.asarray(tokens, dtype)
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        array.tofile(path)
    return path


def change(path: Path, place: int, data: bytes) -> Path:
    """Overwrite bytes of a file."""
    with open(path, "r+b") as stream:
        stream.seek(place)
        stream.write(data)
    return path


def same(got, want, what="value") -> None:
    found = difference(got, want, what)
    assert found is None, found
