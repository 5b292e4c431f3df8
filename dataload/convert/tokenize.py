"""Maps texts to tokens in a conversion, by the `tokenizers` library."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from dataload._util.lazy import load_optional
from dataload.errors import ConfigError, closest
from dataload.storage import storage_of
from dataload.types import Array

_MOST_OF_UINT16 = 1 << 16


@dataclass(frozen=True)
class Tokenize:
    """Turns a text, or a sample's field with one, into ``{"tokens": (n,) int64}``, ending with `end_token`."""

    file: str = field(repr=False)  # may have moved when the conversion is resumed
    text_field: str
    sha256: str
    end_token: int | None
    dtype: str

    @classmethod
    def of(cls, file: str, *, text_field: str = "text", end_token: str | None = None) -> Self:
        """Read a tokenizer; `end_token` is the text of the token after each document."""
        sha256 = hashlib.sha256(storage_of(file).read(file)).hexdigest()
        tokenizer = _load(file, sha256)
        end = None
        if end_token is not None and (end := tokenizer.token_to_id(end_token)) is None:
            known = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
            message = f"{file} has no token {end_token!r}: {closest(end_token, known or ['none is special'])}"
            raise ConfigError(message, key="end_token", value=end_token)
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        return cls(file, text_field, sha256, end, "uint16" if size <= _MOST_OF_UINT16 else "int32")

    @property
    def writer_options(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "end_token": self.end_token}

    def __call__(self, sample: Any) -> dict[str, Array]:
        text = sample
        if isinstance(sample, Mapping):
            if self.text_field not in sample:
                message = f"there is no field {self.text_field!r}: {closest(self.text_field, sample)}"
                raise ConfigError(message, key="text_field", value=self.text_field)
            text = sample[self.text_field]
        text = bytes(text).decode() if isinstance(text, (bytes, bytearray, memoryview)) else text
        if not isinstance(text, str):
            raise ConfigError(f"expected text, got {type(text).__name__}: choose its field", key="text_field")
        found = _load(self.file, self.sha256).encode(text, add_special_tokens=False)
        return {"tokens": np.array(found.ids, np.int64)}


@functools.lru_cache(maxsize=4)  # in each process
def _load(file: str, sha256: str) -> Any:
    if hashlib.sha256(storage_of(file).read(file)).hexdigest() != sha256:
        raise ConfigError(f"{file} has changed since the conversion began", key="tokenizer", value=file)
    return read_tokenizer(file)


def read_tokenizer(file: str) -> Any:
    tokenizers = load_optional("tokenizers", needed_by="--tokenizer", extra="tokens")
    data = storage_of(file).read(file)
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(f"{file} is not a tokenizer.json: {error}", key="tokenizer", value=file) from error
