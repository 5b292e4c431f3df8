"""Preferences: a prompt with a chosen and a rejected answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dataload.collate import Collate, Policy
from dataload.errors import ConfigError
from dataload.text.chat import ChatTransform, Message, mask_of, messages_of
from dataload.text.tokenizer import field_of, labelled
from dataload.types import Array

_ANSWERS = ("chosen", "rejected")


@dataclass(frozen=True, eq=False)
class Preference(ChatTransform):
    """Turns a prompt and two answers into ``chosen_input_ids``, ``chosen_labels``, ..., ``rejected_input_ids``, ...

    Each answer is rendered after the prompt; labels are -100 in the prompt. `Pairs` makes one batch of both.

    Attributes:
        tokenizer: A fast tokenizer of transformers, or the name or directory of one.
        prompt: The field of the prompt: messages, JSON, or the text of a user's message. If samples do not have it, the
            prompt is what the chosen and the rejected conversation begin with.
        chosen: The field of the preferred answer: messages, JSON, or the text of an assistant's message.
        rejected: The field of the other answer.
        tools: The field of tools, JSON schemas, if the sample has it.
        chat_template: A chat template to use instead of the tokenizer's.
        options: Other arguments of `apply_chat_template`.

    Raises:
        ConfigError: When called: the template refuses a conversation or is not prefix-stable, the answers are equal,
            or one has no tokens.
    """

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"

    _conversations: ClassVar[tuple[str, ...]] = ("chosen_", "rejected_")

    def __call__(self, sample: Any) -> dict[str, Array]:
        """Return the tokens and labels of both answers."""
        tools = self.tools_of(sample)
        fields = {"chosen": self.chosen, "rejected": self.rejected}
        answers = {which: self._messages(sample, name, "assistant") for which, name in fields.items()}
        if self.prompt in sample:
            prompt = self._messages(sample, self.prompt, "user")
        else:
            prompt = _common(answers["chosen"], answers["rejected"])
            answers = {which: answer[len(prompt) :] for which, answer in answers.items()}
        if answers["chosen"] == answers["rejected"]:
            raise ConfigError(f"the fields {self.chosen!r} and {self.rejected!r} are equal: nothing is preferred")
        found: dict[str, Array] = {}
        for which, answer in answers.items():
            text = self.render([*prompt, *answer], tools, fields[which])
            begin = self.prefix(text, prompt, tools, fields[which], add_generation_prompt=True)
            tokens, encoding = self._encode(text)
            answered = mask_of(encoding, iter([(begin, len(text))]))
            if not answered.any():
                raise ConfigError(f"the answer in field {fields[which]!r} has no tokens: its labels would all be -100")
            labels = labelled(tokens, answered)
            found |= {f"{which}_{name}": value for name, value in labels.items()}
        return found

    def _messages(self, sample: Any, name: str, role: str) -> list[Message]:
        value = field_of(sample, name)
        if isinstance(value, str) and not value.lstrip().startswith("["):
            return [{"role": role, "content": value}]
        return messages_of(sample, name)


def _common(one: Sequence[Message], other: Sequence[Message]) -> list[Message]:
    """Return the messages that two conversations begin with."""
    pairs = zip(one, other, strict=False)
    count = next((number for number, (first, second) in enumerate(pairs) if first != second), min(len(one), len(other)))
    return [*one[:count]]


@dataclass(frozen=True)
class Pairs:
    """Collates what `Preference` returns into one batch: a row for each chosen answer, then one for each rejected one.

    Fields lose ``chosen_`` and ``rejected_``; a field without, such as a margin, has a row per pair. A batch of n
    samples has 2 n rows; `valid`, with ``tail="pad"``, has n.

    Attributes:
        policies: As in `Collate`, by the names of fields in the batch: ``{"input_ids": Pad(0), "labels": Pad(-100)}``.
    """

    policies: Mapping[str, Policy] = field(default_factory=dict[str, Policy])

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`."""
        both: list[dict[str, Any]] = [
            {name.removeprefix(f"{which}_"): value for name, value in sample.items() if name.startswith(f"{which}_")}
            for which in _ANSWERS
            for sample in samples
        ]
        shared = [
            {name: value for name, value in sample.items() if not name.startswith(("chosen_", "rejected_"))}
            for sample in samples
        ]
        return {**Collate()(shared), **Collate(self.policies)(both)}
