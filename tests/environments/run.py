"""Tries dataload where users have it: other interpreters, one extra alone, and unusual machines.

    make environments                                   each extra alone, types of 3.14, unit tests on each condition
    make environments PYTHONS='python3.12 python3.13'   with other interpreters, too
    make environments ONLY='extras C-locale'            some of it

An environment with one extra must do what the bare one names that extra for, and never name it again.
"""

# ruff: noqa: T201 - a script that tells what it found

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ACTIONS = Path(__file__).with_name("actions.py")
UV = str(Path(sys.executable).with_name("uv"))
LARGE = {"jax", "ray", "examples", "docs", "dev", "bench", "all"}  # not installed alone
TOOLS = ("pytest-timeout", "pytest-xdist")
UNIT = ("-m", "pytest", "-n", "2", "--dist", "loadfile", "-q", "--no-header", "-p", "no:cacheprovider", "tests/unit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="*", default=[], help="further interpreters, names or paths")
    parser.add_argument("--only", nargs="*", default=[], help="names of what to try")
    given = parser.parse_args()
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        tries = {"extras": lambda: extras(Path(folder))}
        tries["types-3.14"] = types
        tries |= {name: lambda name=name: condition(name, Path(folder)) for name in CONDITIONS}
        tries |= {python: lambda python=python: interpreter(python, Path(folder)) for python in given.pythons}
        if unknown := {*given.only} - {*tries}:
            raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(tries)}")
        for name in given.only or tries:
            problems = [*tries[name]()]
            print(f"{name}: {'passed' if not problems else ''}", *problems, sep="\n  " if problems else "", flush=True)
            failed += [name] if problems else []
    return bool(failed)


def extras(folder: Path) -> Iterator[str]:
    """Install each extra alone; yield what is wrong."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bare = outcomes(folder, None)
    yield from (f"without extras: {name}: {found}" for name, found in bare.items() if not found.startswith("extra "))
    named = {found.removeprefix("extra ") for found in bare.values()}
    yield from (f"messages name {extra}, which is not an extra" for extra in named - declared.keys())
    for extra in declared.keys() - LARGE:
        found = outcomes(folder, extra)
        for name, outcome in found.items():
            if outcome == f"extra {extra}" or not outcome.startswith("extra "):
                yield f"with {extra} alone: {name}: {outcome}"
        wanted = {name for name, outcome in bare.items() if outcome == f"extra {extra}"}
        if wanted and not wanted - found.keys():
            yield f"with {extra} alone: none of {', '.join(sorted(wanted))} works"


def outcomes(folder: Path, extra: str | None) -> dict[str, str]:
    """Return what fails in an environment of its own."""
    python = environment(folder / (extra or "bare"), sys.executable, f"{ROOT}[{extra}]" if extra else str(ROOT))
    return json.loads(run([python, ACTIONS], cwd=folder).stdout)


def environment(folder: Path, python: str, *packages: str) -> str:
    """Install packages into a new environment; return its interpreter."""
    links = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
    ).stdout.strip()
    environ = {**os.environ, **({"UV_FIND_LINKS": links.replace(" ", ",")} if links else {})}
    run([UV, "venv", "--quiet", "--python", python, folder])
    found = str(folder / "bin/python")
    run([UV, "pip", "install", "-q", "--python", found, "-c", ROOT / "constraints.txt", *packages], env=environ)
    return found


def interpreter(python: str, folder: Path) -> Iterator[str]:
    """Run the unit tests with another interpreter."""
    found = environment(folder / Path(python).name, python, f"{ROOT}[all,testing]", "pandas", "polars", *TOOLS)
    yield from tests([found, *UNIT], {})


def types() -> Iterator[str]:
    """Check the types, and with them the modules of the standard library, of the newest Python."""
    pyright = Path(sys.executable).with_name("pyright")
    done = subprocess.run([pyright, "--pythonversion", "3.14"], cwd=ROOT, capture_output=True, text=True, check=False)
    yield from done.stdout.splitlines() if done.returncode else ()


CONDITIONS = ("numpy-core", "C-locale", "odd-path", "read-only-home", "small-shm")


def condition(name: str, folder: Path) -> Iterator[str]:
    """Run the unit tests on an unusual machine."""
    command: list[str] = [sys.executable, *UNIT]
    odd = folder / "with spaces, ä and 数"
    odd.mkdir(exist_ok=True)
    environ = {
        "numpy-core": {"DATALOAD_CORE": "numpy"},
        "C-locale": {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        "odd-path": {"TMPDIR": str(odd)},
        "read-only-home": {"HOME": "/proc", "XDG_CACHE_HOME": "/proc/cache"},
        "small-shm": {},
    }[name]
    if name == "small-shm":
        small = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", small, "sh", *command]
    yield from tests(command, environ)


def tests(command: list[str], environ: dict[str, str]) -> Iterator[str]:
    """Run tests; yield the failures, or what else went wrong."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        lines = done.stdout.splitlines()
        yield from [line for line in lines if line.startswith(("FAILED", "ERROR"))] or [done.stderr[-500:], *lines[-5:]]


def run(command: list[object], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command; raise with what it said if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    return done


if __name__ == "__main__":
    sys.exit(main())
