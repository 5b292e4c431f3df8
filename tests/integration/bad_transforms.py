"""Transforms that fail, in a module that worker processes can import."""

from bad_errors import Demanding, Holding

BAD = frozenset({4, 17, 18, 19, 33})


class Mute(Exception):
    """Has no text."""

    def __str__(self):
        raise RuntimeError("no text")


def make_error(kind):
    """An exception of each sort that has made loaders hang or lie, and what its text should hold."""
    return {
        "plain": (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        "stop": (StopIteration(3), "StopIteration: 3"),
        "demanding": (Demanding(3, "no"), "Demanding: 3: no"),
        "holding": (Holding(), "Holding: holds a lock"),
        "mute": (Mute(), "Mute: (no message: its __str__ raised RuntimeError)"),
        "huge": (ValueError("x" * 3_000_000), "ValueError: xxx"),
        "control": (ValueError("\x1b[2J\0\udc80"), "ValueError: \\x1b[2J\\x00\\udc80"),
        "exit": (SystemExit(3), "SystemExit: 3"),
        "interrupt": (KeyboardInterrupt(), "KeyboardInterrupt"),
        "generator": (GeneratorExit("out"), "GeneratorExit: out"),
    }[kind]


KINDS = ("plain", "stop", "demanding", "holding", "mute", "huge", "control", "exit", "interrupt", "generator")


def fail_by_epoch(sample, context):
    """At record 7 of each epoch another sort of exception."""
    if context.index == 7:
        raise make_error(KINDS[context.epoch % len(KINDS)])[0]
    return sample


def fail_on_bad(sample, context):
    """For a few records."""
    if context.index in BAD:
        raise ValueError(f"record {context.index} is bad")
    return {**sample, "noise": context.generator.random()}
