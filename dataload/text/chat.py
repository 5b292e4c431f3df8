"""Conversations as tokens and labels, and preferences: a prompt with a chosen and a rejected answer."""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, cast

import numpy as np

from dataload.collate import Collate, Policy
from dataload.collate.collate import IGNORED
from dataload.errors import ConfigError, message_of
from dataload.text.tokenizer import LABELLED, TokenTransform, field_of, labelled
from dataload.types import Array

Message: TypeAlias = Mapping[str, Any]
TrainOn: TypeAlias = Literal["assistant", "last", "all"]

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, eq=False)
class ChatTransform(TokenTransform):
    """The base class of transforms that render conversations with a chat template."""

    tools: str = field(default="tools", kw_only=True)
    chat_template: str | None = field(default=None, kw_only=True)
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    _conversations: ClassVar[tuple[str, ...]] = ("",)
    """Beginnings of the names of a sample's fields."""

    def render(self, messages: Sequence[Message], tools: Any, where: str, **more: Any) -> Any:
        """Return what `apply_chat_template` returns; `where` names the field in errors."""
        given = {"tools": tools, "chat_template": self.chat_template, "tokenize": False, **self.options, **more}
        try:
            return self.tokenizer.apply_chat_template(messages, **given)
        except Exception as error:  # templates raise what they like, also for the content of messages
            message = f"the chat template refuses the conversation in field {where!r}: {message_of(error)}"
            raise ConfigError(message, key=where) from error

    def prefix(self, text: str, messages: Sequence[Message], tools: Any, where: str, **more: Any) -> int:
        """Return the length of the first messages in the text of all; a ConfigError if they do not begin it."""
        if not messages:
            message = f"the conversation in field {where!r} begins with an answer, and the chat template has no markers"
            raise ConfigError(f"{message} that show where it begins: {_MARKERS_NEEDED}", key=where)
        found = self.render(messages, tools, where, **more)
        if not text.startswith(found):
            same = next((at for at, (one, two) in enumerate(zip(text, found, strict=False)) if one != two), len(text))
            raise ConfigError(
                f"the chat template is not prefix-stable, so it does not show which tokens are the answer: the first "
                f"{len(messages)} messages of field {where!r} are {found[same : same + 40]!r} from character {same} if "
                f"none follow, and {text[same : same + 40]!r} if others do. {_MARKERS_NEEDED}, or train_on='last'",
                key=where,
            )
        return len(found)

    def compact(self, sample: Mapping[str, Array]) -> bytes:
        """Return bytes for `restore`, token ids and a bit for each label; none for a sample of another kind."""
        if {*sample} != {f"{which}{name}" for which in self._conversations for name in LABELLED}:
            return b""
        parts: list[bytes] = []
        for which in self._conversations:
            ids, labels = sample[f"{which}input_ids"], sample[f"{which}labels"]
            parts += [np.uint32(len(ids)).tobytes(), ids.astype(np.uint32).tobytes()]
            parts.append(np.packbits(labels != IGNORED).tobytes())
        again = self.restore(compact := b"".join(parts))
        is_same = all(
            each.dtype == sample[name].dtype and np.array_equal(each, sample[name]) for name, each in again.items()
        )
        return compact if is_same else b""

    def restore(self, compact: bytes) -> dict[str, Array]:
        sample, at = dict[str, Array](), 0
        for which in self._conversations:
            count = int(np.frombuffer(compact, np.uint32, 1, at)[0])
            ids = np.frombuffer(compact, np.uint32, count, at + 4)
            bits = np.frombuffer(compact, np.uint8, -(-count // 8), at + 4 + ids.nbytes)
            at += 4 + ids.nbytes + bits.nbytes
            trained = np.unpackbits(bits, count=count).view(np.bool_)
            sample |= {f"{which}{name}": each for name, each in labelled(ids, trained).items()}
        return sample

    def tools_of(self, sample: Any) -> Any:
        """Return the tools of a sample, which may be JSON, or None."""
        tools = sample.get(self.tools) if isinstance(sample, Mapping) else None
        return _parsed(tools, self.tools) or None


_MARKERS_NEEDED = "Pass a chat_template with {% generation %} around the answers"


@dataclass(frozen=True, eq=False)
class Chat(ChatTransform):
    """Turns a conversation into ``input_ids`` and ``labels`` (int64), -100 where nothing is learnt, and a mask.

    The chat template of the tokenizer renders the conversation. Its ``{% generation %}`` markers say which tokens the
    assistant writes. Without markers, the messages up to each answer are rendered by themselves, and an answer is what
    its message adds; that the text of fewer messages begins the text of all is checked.

    The first token is never a label, because nothing comes before it.

    Attributes:
        tokenizer: A fast tokenizer of transformers, or the name or directory of one.
        messages: The field of messages: dicts with ``role`` and ``content``, as transformers take them, or JSON. In
            dicts, other keys that are None count as missing, because a table gives each struct the keys of all rows.
        train_on: Tokens to learn: ``"assistant"``, those of all answers; ``"last"``, of the last answer; ``"all"``.
        tools: The field of tools, JSON schemas, if the sample has it.
        chat_template: A chat template to use instead of the tokenizer's.
        options: Other arguments of `apply_chat_template`, such as ``{"enable_thinking": False}``.

    Raises:
        ConfigError: When called: the template refuses the conversation, there is no answer, no token is learnt, or the
            answers cannot be told from the rest. `on_error` skips and counts such records.
    """

    messages: str = "messages"
    train_on: TrainOn = "assistant"

    def __call__(self, sample: Any) -> dict[str, Array]:
        """Return the tokens and labels of a sample's conversation."""
        messages, tools, where = messages_of(sample, self.messages), self.tools_of(sample), self.messages
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers and self.train_on != "all":
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigError(f"the conversation in field {where!r} has no assistant turn: its roles are {roles}")
        if self.train_on == "all":
            return labelled(self._encode(self.render(messages, tools, where))[0])
        template: Any = self.tokenizer.get_chat_template(self.chat_template, tools)
        if _has_markers(template):
            marked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            found = self.render(messages, tools, where, **marked)
            tokens, trained = found["input_ids"], np.frombuffer(bytearray(found["assistant_masks"]), np.bool_)
            if self.train_on == "last":
                starts = np.flatnonzero(np.diff(trained, prepend=False) & trained)
                trained[: max(starts, default=0)] = False
        else:
            text = self.render(messages, tools, where)
            chosen = answers if self.train_on == "assistant" else answers[-1:]
            tokens, encoding = self._encode(text)
            trained = mask_of(encoding, self._spans(text, messages, chosen, tools))
        if not trained[1:].any():
            message = f"the labels of the conversation in field {where!r} are all -100: the answers have no tokens"
            raise ConfigError(f"{message}, or the chat template marks none", key=where)
        return labelled(tokens, trained)

    def _spans(
        self, text: str, messages: Sequence[Message], answers: Sequence[int], tools: Any
    ) -> Iterator[tuple[int, int]]:
        """Yield the characters of each answer, with what the template adds to it."""
        for turn in answers:
            begin = self.prefix(text, messages[:turn], tools, self.messages, add_generation_prompt=True)
            is_last = turn + 1 == len(messages)
            yield begin, len(text) if is_last else self.prefix(text, messages[: turn + 1], tools, self.messages)


def mask_of(encoding: Any, spans: Iterator[tuple[int, int]]) -> Array:
    """Return which tokens overlap with spans of characters, (tokens,) bool."""
    count = len(encoding)
    mask = np.zeros(count, np.bool_)
    for begin, end in spans:
        stop = _token_from(encoding, end)
        while stop < count and encoding.token_to_chars(stop)[0] < end:
            stop += 1
        mask[_token_from(encoding, begin) : stop] = True
    return mask


def _token_from(encoding: Any, char: int) -> int:
    """Return the first token with a character from `char` on, or the number of tokens."""
    count = len(encoding)
    length = encoding.token_to_chars(count - 1)[1] if count else 0
    while char < length:  # characters that the tokenizer drops are in no token
        token = encoding.char_to_token(char)
        if token is not None:
            return token
        char += 1
    return count


@functools.lru_cache(maxsize=16)
def _has_markers(template: str) -> bool:
    return _MARKER.search(template) is not None


def messages_of(sample: Any, name: str) -> list[Message]:
    """Return the messages in a field of a sample, which may be JSON."""
    messages = _parsed(field_of(sample, name), name)
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ConfigError(f"field {name!r} must be a list of messages, got {type(messages).__name__} {messages!r:.80}")
    for number, message in enumerate(cast("Sequence[Any]", messages)):
        if (type(message) is not dict and not isinstance(message, Mapping)) or "role" not in message:
            found = f"the keys {', '.join(map(str, message))}" if isinstance(message, Mapping) else repr(message)[:80]
            raise ConfigError(f"message {number} in field {name!r} must be a dict with role and content, got {found}")
    return cast("list[Message]", messages if isinstance(messages, list) else [*cast("Any", messages)])


def _parsed(value: Any, name: str) -> Any:
    """Return the value of a field, from JSON if it is text."""
    if not isinstance(value, (str, bytes)):
        return _without_nulls(value.tolist() if isinstance(value, np.ndarray) else value)
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"field {name!r} is text, and not JSON: {error}", key=name) from error


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that are None: in a table, each struct has the keys of all rows."""
    if isinstance(value, (list, tuple)):
        return [_without_nulls(each) for each in cast("Sequence[Any]", value)]
    if not isinstance(value, dict):
        return value
    given = cast("dict[str, Any]", value)
    kept = "content" if "role" in given else None  # templates ask whether it is none
    return {key: _without_nulls(each) for key, each in given.items() if each is not None or key == kept}


_ANSWERS = ("chosen", "rejected")
_MESSAGES = re.compile(r"\s*\[\s*\{")


@dataclass(frozen=True, eq=False)
class Preference(ChatTransform):
    """Turns a prompt and two answers into ``chosen_input_ids``, ``chosen_labels``, ..., ``rejected_input_ids``, ...

    Each answer is rendered after the prompt; labels are -100 in the prompt. `Pairs` makes one batch of both.

    Attributes:
        tokenizer: A fast tokenizer of transformers, or the name or directory of one.
        prompt: The field of the prompt: messages, JSON, or the text of a user's message. If samples do not have it, or
            both conversations repeat it, the prompt is what the chosen and the rejected conversation begin with.
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
        common = _common(answers["chosen"], answers["rejected"])
        prompt = self._messages(sample, self.prompt, "user") if self.prompt in sample else common
        if all(message in common for message in prompt):  # the conversations have it, too, as in UltraFeedback
            prompt, answers = common, {which: answer[len(common) :] for which, answer in answers.items()}
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
        if isinstance(value, str) and not _MESSAGES.match(value):
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
