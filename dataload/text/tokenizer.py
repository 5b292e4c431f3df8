"""The base of transforms with a tokenizer, values with a digest in any process, and transforms of documents."""

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
from dataload.transforms import SampleContext
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
        return [bos] if added[:1] == [bos] else [], [] if eos is None else [eos]


LABELLED = ("input_ids", "labels", "attention_mask")
"""The fields of a sample that `labelled` returns."""


def labelled(tokens: Any, trained: Any = True) -> dict[str, Array]:
    """Return a sample of tokens, whose labels are the tokens where `trained`, a mask, is true."""
    ids = np.array(tokens, np.int64)
    labels = np.where(trained, ids, IGNORED)
    labels[:1] = IGNORED  # nothing comes before it
    return dict(zip(LABELLED, (ids, labels, np.ones(len(ids), np.int8)), strict=True))


def field_of(sample: Any, name: str) -> Any:
    """Return a field of a sample; a ConfigError names those that it has."""
    if not isinstance(sample, Mapping) or name not in sample:
        found = closest(name, map(str, sample)) if isinstance(sample, Mapping) else "the sample is not a record"
        raise ConfigError(f"there is no field {name!r}: {found}", key=name)
    return sample[name]


def text_of_field(sample: Any, name: str) -> str:
    """Return the text in a field of a sample."""
    text = field_of(sample, name)
    text = bytes(text).decode() if isinstance(text, (bytes, bytearray, memoryview)) else text
    if not isinstance(text, str):
        raise ConfigError(f"field {name!r} must be text, got {type(text).__name__}", key=name)
    return text


_SENTINELS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek
)


@dataclass(frozen=True, eq=False)
class FillInTheMiddle(TokenTransform):
    """Moves the middle of a document to its end, so that a model learns to fill gaps; gives tokens, labels and a mask.

    A document is cut at two random characters. PSM order is prefix, suffix, middle, each after its token; SPM order is
    suffix, prefix, middle (variant 2 of Bavarian et al., 2022). The random numbers are the sample's own: the same for
    any number of workers, and others in each epoch. A document ends with the tokenizer's end token, and begins with its
    begin token if the tokenizer adds that by itself.

    Attributes:
        tokenizer: A fast tokenizer of transformers, or the name or directory of one.
        text: The field of the document.
        rate: Share of the documents that are cut; others stay as they are.
        spm_rate: Share of those in SPM order.
        sentinels: The tokens before prefix, suffix and middle. None finds the tokens of Qwen, CodeGemma, StarCoder,
            SantaCoder, Code Llama and DeepSeek.

    Raises:
        ConfigError: The tokenizer lacks the tokens, a rate is not in [0, 1], or a sample has no such text.
    """

    text: str = "text"
    rate: float = 0.5
    spm_rate: float = 0.5
    sentinels: tuple[str, str, str] | None = None

    def __post_init__(self) -> None:
        TokenTransform.__post_init__(self)
        for name, rate in (("rate", self.rate), ("spm_rate", self.spm_rate)):
            if not 0 <= rate <= 1:
                raise setting_error(name, rate, "must be a number from 0 to 1")
        known = self.tokenizer.backend_tokenizer.token_to_id
        tried = _SENTINELS if self.sentinels is None else (tuple(self.sentinels),)
        found = next((each for each in tried if None not in map(known, each)), None)
        if found is None or len(found) != 3:
            message = f"the tokenizer lacks the tokens of prefix, suffix and middle, such as {', '.join(tried[0])}"
            raise ConfigError(f"{message}: add them, or pass sentinels", key="sentinels", value=self.sentinels)
        object.__setattr__(self, "sentinels", found)

    def __call__(self, sample: Any, context: SampleContext) -> dict[str, Array]:
        """Return the tokens and labels of a sample's document."""
        text, generator = text_of_field(sample, self.text), context.generator
        begin, end = self._ends
        if generator.random() >= self.rate:
            return labelled([*begin, *self._encode(text)[0], *end])
        first, second = sorted(generator.integers(0, len(text) + 1, size=2).tolist())
        parts = [text[:first], text[second:], text[first:second]]
        prefix, suffix, middle = self.tokenizer(parts, add_special_tokens=False)["input_ids"]
        before, after, gap = map(self.tokenizer.backend_tokenizer.token_to_id, self.sentinels or ())
        if generator.random() < self.spm_rate:
            return labelled([*begin, before, after, *suffix, gap, *prefix, *middle, *end])
        return labelled([*begin, before, *prefix, after, *suffix, gap, *middle, *end])


@dataclass(frozen=True, eq=False)
class PrefixLM(TokenTransform):
    """Gives tokens whose labels are -100 in a prefix, and ``prefix_mask``, (tokens,) int8, which is 1 there.

    With the mask, a model can attend to the whole prefix in both directions. The prefix is a field, or the beginning of
    the text up to a random token, which is the sample's own: the same for any number of workers. Begin and end tokens
    are as in `FillInTheMiddle`.

    Attributes:
        tokenizer: A fast tokenizer of transformers, or the name or directory of one.
        text: The field of the text.
        prefix: The field of a prefix, which is tokenized by itself. None cuts the text.

    Raises:
        ConfigError: When called: a field is missing, is not text, or nothing follows the prefix.
    """

    text: str = "text"
    prefix: str | None = None

    def __call__(self, sample: Any, context: SampleContext) -> dict[str, Array]:
        """Return the tokens, labels and masks of a sample's text."""
        begin, end = self._ends
        tokens: list[int] = self._encode(text_of_field(sample, self.text))[0]
        if self.prefix is None:
            head: list[int] = []
            count = int(context.generator.integers(0, max(1, len(tokens))))
        else:
            head = self._encode(text_of_field(sample, self.prefix))[0]
            count = len(head)
        if not tokens:
            raise ConfigError(f"field {self.text!r} is empty: nothing follows the prefix", key=self.text)
        every = [*begin, *head, *tokens, *end]
        in_prefix = np.arange(len(every)) < len(begin) + count
        return {**labelled(every, ~in_prefix), "prefix_mask": in_prefix.astype(np.int8)}
