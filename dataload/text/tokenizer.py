"""The base of transforms with a tokenizer: values with a digest, in any process."""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from dataload._util.fingerprint import code_digest, digest
from dataload._util.lazy import load_optional
from dataload._util.settings import check_settings, setting_error
from dataload.collate.collate import IGNORED
from dataload.errors import ConfigError, closest, message_of
from dataload.types import Array

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TokenTransform:
    """The base class of transforms with a tokenizer. Equal settings and tokenizers make equal transforms.

    Attributes:
        tokenizer: A fast tokenizer of transformers, or the name or directory of one, which is loaded.

    Raises:
        ConfigError: A setting is wrong, the tokenizer cannot be loaded, or it has no ``tokenizer.json``.
        MissingDependencyError: transformers is not installed.
    """

    tokenizer: Any = field(repr=False)

    def __post_init__(self) -> None:
        check_settings(self)
        tokenizer = self.tokenizer
        if isinstance(tokenizer, (str, os.PathLike)):
            transformers = load_optional("transformers", needed_by="a tokenizer's name", extra="text")
            try:
                tokenizer = transformers.AutoTokenizer.from_pretrained(os.fspath(tokenizer))
            except Exception as error:  # of the hub, of files and of their content
                message = f"the tokenizer {self.tokenizer!r} cannot be loaded: {message_of(error)}"
                raise ConfigError(message, key="tokenizer", value=self.tokenizer) from error
        if not getattr(tokenizer, "is_fast", False):
            rule = "must be a fast tokenizer of transformers (one with a tokenizer.json), or the name of one"
            raise setting_error("tokenizer", type(tokenizer).__name__, rule)
        # As the first call does: other threads could not do so while one encodes. A call would also start threads,
        # after which worker processes cannot be forks, which start sooner.
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        object.__setattr__(self, "tokenizer", tokenizer)

    def fingerprint(self) -> str:
        """Return a digest of settings, tokenizer and the code of a class of yours, the same in every process."""
        is_users = not type(self).__module__.startswith("dataload.")
        return digest(self._digest, code_digest(type(self))) if is_users else self._digest

    @cached_property
    def _digest(self) -> str:
        tokenizer = self.tokenizer
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        own = {name: value for name, value in rules.items() if name not in ("truncation", "padding")}
        parts = json.dumps(own, sort_keys=True), tokenizer.chat_template, sorted(tokenizer.special_tokens_map.items())
        settings = [(each.name, getattr(self, each.name)) for each in dataclasses.fields(self) if each.repr]
        plain = [(name, sorted(value.items()) if isinstance(value, Mapping) else value) for name, value in settings]
        versions = [getattr(sys.modules.get(name), "__version__", "") for name in ("transformers", "tokenizers")]
        return digest(type(self).__qualname__, plain, parts, versions)  # others may render or tokenize otherwise

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._digest == getattr(other, "_digest", None)

    def __hash__(self) -> int:
        return hash(self._digest)

    def _encode(self, text: str) -> tuple[list[int], Any]:
        """Return the tokens of a text, without tokens that it does not have, and their encoding."""
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)  # as the tokenizer does
        return encoding.ids, encoding

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """The token that begins a document, if the tokenizer adds one, and the one that ends it, if there is one."""
        tokenizer = self.tokenizer
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        added = tokenizer.backend_tokenizer.encode("").ids
        return added[:1] if bos is not None and added[:1] == [bos] else [], [] if eos is None else [eos]


def labelled(tokens: Any, trained: Any = True) -> dict[str, Array]:
    """Return a sample of tokens, whose labels are the tokens where `trained`, a mask, is true."""
    ids = np.array(tokens, np.int64)
    labels = np.where(trained, ids, IGNORED)
    labels[:1] = IGNORED  # nothing comes before it
    return {"input_ids": ids, "labels": labels, "attention_mask": np.ones(len(ids), np.int8)}


def field_of(sample: Any, name: str) -> Any:
    """Return a field of a sample; a ConfigError names those that it has."""
    if not isinstance(sample, Mapping) or name not in sample:
        known = [str(key) for key in sample] if isinstance(sample, Mapping) else ["the sample is not a record"]
        raise ConfigError(f"there is no field {name!r}: {closest(name, known)}", key=name)
    return sample[name]


def text_of_field(sample: Any, name: str) -> str:
    """Return the text in a field of a sample."""
    text = field_of(sample, name)
    text = bytes(text).decode() if isinstance(text, (bytes, bytearray, memoryview)) else text
    if not isinstance(text, str):
        raise ConfigError(f"field {name!r} must be text, got {type(text).__name__}", key=name)
    return text
