"""Checks of a multi-stream loader's settings."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from dataload.errors import ConfigError
from dataload.streams.order import SequenceOrder

__all__ = ["Tail", "check_epochs", "check_streams"]

Tail: TypeAlias = Literal["pad", "drop"]
"""What becomes of an epoch once a row has run out: go on with blank places in it, or end."""


def check_streams(make_stream: Any, sequences: Any) -> None:
    """See to it that there are sequences, and something to make streams of them.

    Raises:
        ConfigError: There is not.
    """
    if not callable(make_stream):
        raise ConfigError(
            f"make_stream is a function of a sequence, got {make_stream!r}", key="make_stream", value=make_stream
        )
    # Each letter of a text would be one.
    if isinstance(sequences, str) or not hasattr(sequences, "__len__") or not hasattr(sequences, "__getitem__"):
        raise ConfigError(
            f"sequences is a list of what streams are made of, got {sequences!r}", key="sequences", value=sequences
        )
    if not len(sequences):
        raise ConfigError("sequences is empty, and a row needs one to follow", key="sequences", value=sequences)


def check_epochs(order: SequenceOrder, tail: Tail | None, epochs: int | None) -> Tail:
    """The tail of epochs, where there are such.

    Raises:
        ConfigError: There are none, or none that has a step.
    """
    if order.mode == "independent":
        for key, value in (("epochs", epochs), ("tail", tail)):
            if value is not None:
                raise ConfigError(
                    f"{key} goes with mode='split': rows of mode='independent' end at no common step, so they go on",
                    key=key,
                    value=value,
                )
    elif tail == "drop" and order.sequences < order.rows:
        raise ConfigError(
            f"{order.sequences} sequences do not fill {order.rows} rows, and tail='drop' has only steps that do: use "
            "tail='pad', fewer rows or mode='independent'",
            key="tail",
            value=tail,
        )
    return tail or "pad"
