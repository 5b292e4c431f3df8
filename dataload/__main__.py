"""The command ``dataload``, also available as ``python -m dataload``."""

import sys

from dataload._util.lazy import load_optional
from dataload.errors import MissingDependencyError

INTERRUPTED = 130


def main() -> int:
    """Run the command line with the arguments of this process.

    Returns:
        The exit code: 0 on success, 1 for bad data, 2 for a wrong command or setting, 130 after Ctrl-C.
    """
    try:
        if sys.argv[1:] == ["--version"]:
            from dataload.cli import version_line

            sys.stdout.write(f"{version_line()}\n")
            return 0
        for package in ("typer", "rich"):
            load_optional(package, needed_by="the command line", extra="cli")
        from dataload.cli.app import run
    except MissingDependencyError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        return INTERRUPTED
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
