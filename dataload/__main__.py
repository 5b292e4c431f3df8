"""The command ``dataload``, also as ``python -m dataload``."""

from __future__ import annotations

import sys

from dataload._util.optional import load_optional
from dataload.errors import MissingDependencyError

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process.

    Returns:
        The exit code: 0; 1 when data are bad; 2 when the command or a setting is wrong; 130 after Ctrl-C.
    """
    try:
        for package in ("typer", "rich"):
            load_optional(package, needed_by="the command line", extra="cli")
    except MissingDependencyError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    from dataload.cli.app import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
