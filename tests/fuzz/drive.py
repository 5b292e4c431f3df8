"""What the searches of this folder share: numbered cases from the command line, counted and reported."""

# ruff: noqa: T201 - a script that tells how far it is

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
MOST_FAILURES = 10


def command_line(doc: str | None, **defaults: object) -> argparse.Namespace:
    """Parse options of these names, whose types are those of the defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, list):
            parser.add_argument(name, nargs="*", default=default)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def drive(doc: str | None, unit: str, default: int, check: Callable[[int], str]) -> int:
    """Check the cases ``--first``, ``--first + 1``, ... of a search; return the exit code.

    Args:
        doc: Help.
        unit: Name of the option for how many, such as "rounds".
        default: How many there are without it.
        check: Takes the number of a case and returns what kind it was; an error means that it failed.
    """
    given = command_line(doc, **{unit: default, "first": 0})
    count, begun = getattr(given, unit), time.monotonic()
    kinds, failures = Counter[str](), 0
    for number in range(given.first, given.first + count):
        try:
            kinds[check(number)] += 1
        except Exception:
            failures += 1
            print(f"{unit} {number}:\n{traceback.format_exc()}", flush=True)
            if failures == MOST_FAILURES:
                break
    print(*(f"{found:>7} {kind}" for kind, found in sorted(kinds.items())), sep="\n")
    print(f"{count} {unit} in {time.monotonic() - begun:.0f} s: {failures} failed")
    return int(failures > 0)
