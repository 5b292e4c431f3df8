"""Documents for other aims than the next token of the whole text."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dataload._util.settings import setting_error
from dataload.errors import ConfigError
from dataload.text.tokenizer import TokenTransform, labelled, text_of_field
from dataload.transforms import SampleContext
from dataload.types import Array

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
