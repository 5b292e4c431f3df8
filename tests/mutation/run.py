"""Small faults planted in the library, each run against the tests that cover it: do they notice?

    make mutants                functions that differ from main, at most 150 mutants
    make mutants SAMPLE=1000    drawn from all rooms, with the score of each

A mutant is a change of one operator, number or condition by cosmic-ray's operators. Mutants are drawn evenly over
functions. The tests of a mutant are those that ran its line in the last `make coverage`, or else the test files that
are named after its module or its folder; those of its module come first. Survivors that are equivalent, or that no test
should catch, are listed with the reason in accepted.toml.
"""

# ruff: noqa: T201 - a script that tells what it found

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue

import cosmic_ray.plugins
import coverage
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).parents[2]
ACCEPTED = Path(__file__).with_name("accepted.toml")
ROOMS = (
    *("samplers", "loader", "executors", "streams", "storage"),
    *("convert", "jobs", "torch", "sources", "codecs", "catalog"),
)
OPERATORS = (
    *("NumberReplacer", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("AddNot", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop", "ExceptionReplacer"),
    *("ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_USub"),
    *(f"ReplaceBinaryOperator_{change}" for change in (
        "Add_Sub", "Sub_Add", "Mul_FloorDiv", "FloorDiv_Mul", "Mod_Mul", "RShift_LShift", "LShift_RShift",
        "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitAnd",
    )),
    *(f"ReplaceComparisonOperator_{change}" for change in (
        "Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_Gt", "LtE_Lt", "LtE_GtE", "Gt_GtE", "Gt_Lt", "GtE_Gt", "GtE_LtE",
        "Is_IsNot", "IsNot_Is",
    )),
)  # fmt: skip
TESTS = ["tests/unit", "tests/properties", "tests/golden", "tests/conformance", "tests/integration"]
ALWAYS = ["tests/golden/test_states.py"]  # fingerprints, orders and states
MOST_TESTS = 150  # of a mutant
MOST_FILES = 24  # of a mutant
SECONDS = 150  # of a mutant


@dataclass(frozen=True)
class Mutant:
    """A change of one line, or of a few, of a file; `line` is the first."""

    path: str
    function: str
    line: int
    operator: str
    occurrence: int

    @property
    def room(self) -> str:
        return self.path.split("/")[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=0, help="mutants of all rooms; by default of what has changed")
    parser.add_argument("--base", default="main", help="the commit with which functions are compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="*", default=ROOMS)
    parser.add_argument("--tests", nargs="*", help="choose among these files and folders by name")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    among = given.tests or (None if covering().exists() else TESTS)

    files = [path for room in given.rooms for path in sorted(ROOT.glob(f"dataload/{room}/**/*.py"))]
    changed = None if given.sample else changed_lines(given.base)
    found = [mutant for path in files for mutant in mutants_of(path, changed)]
    drawn = draw(found, given.sample or 150, random.Random(given.seed))
    print(f"{len(drawn)} of {len(found)} mutants in {len({(m.path, m.function) for m in found})} functions", flush=True)
    accepted = {entry["mutant"]: entry["reason"] for entry in tomllib.loads(ACCEPTED.read_text())["accepted"]}

    results: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(given.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            copies.put(copied(Path(directory, str(number))))
        for mutant, (outcome, difference) in zip(
            drawn, pool.map(lambda each: tried(each, copies, among), drawn), strict=True
        ):
            if outcome != "killed" and difference in accepted:
                outcome = "accepted"
            results[mutant.room, outcome] += 1
            if outcome not in ("killed", "accepted"):
                print(f"{outcome}: {mutant.path}:{mutant.line} {mutant.function}\n    {difference}", flush=True)
    report(results)
    return 1 if any(outcome == "survived" for _, outcome in results) else 0


def covering() -> Path:
    """Return the path of what `make coverage` has recorded: which test ran which line."""
    return ROOT / ".coverage"


def changed_lines(base: str) -> dict[str, set[int]]:
    """Return the lines of files that differ from a commit."""
    text = subprocess.run(
        ["git", "diff", "-U0", base, "--", "dataload"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, set[int]] = defaultdict(set)
    path = ""
    for line in text.splitlines():
        if line.startswith("+++ b/"):
            path = line[6:]
        elif line.startswith("@@"):
            start, _, count = line.split("+")[1].split(" ")[0].partition(",")
            found[path] |= set(range(int(start), int(start) + int(count or 1)))
    return found


def mutants_of(path: Path, changed: dict[str, set[int]] | None) -> Iterator[Mutant]:
    """Yield the mutants of functions in a file; of those with lines that changed, unless it is None."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text()
    wanted = None if changed is None else changed.get(name, set())
    if wanted is not None and not wanted:
        return
    functions, ignored, lines = *places(text), text.splitlines()
    operators = {each: cosmic_ray.plugins.get_operator(f"core/{each}")() for each in OPERATORS}
    occurrences: Counter[str] = Counter()
    for node in ast_nodes(get_ast(text)):
        for operator_name, operator in operators.items():
            for (line, _), _ in operator.mutation_positions(node):
                occurrence = occurrences[operator_name]
                occurrences[operator_name] += 1
                function = functions.get(line)
                if function is None or line in ignored:
                    continue
                if operator_name == "ReplaceTrueWithFalse" and "strict=True" in lines[line - 1]:
                    continue  # a check that no correct program fails
                if wanted is None or any(functions.get(each) == function for each in wanted):
                    yield Mutant(name, function, line, operator_name, occurrence)


def places(text: str) -> tuple[dict[int, str], set[int]]:
    """Return the innermost function of each line, and the lines whose mutants say nothing: annotations and messages."""
    functions: dict[int, str] = {}
    ignored: set[int] = set()

    def walk(node: ast.AST, within: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = within
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{within}.{child.name}" if within else child.name
                if not isinstance(child, ast.ClassDef):
                    body = range(child.body[0].lineno, (child.end_lineno or 0) + 1)
                    functions.update(dict.fromkeys(body, inner))
            elif isinstance(child, (ast.Raise, ast.AnnAssign)):
                value = getattr(child, "value", None)
                stop = value.lineno if value is not None else (child.end_lineno or 0) + 1
                ignored.update(range(child.lineno, stop))
                if isinstance(child, ast.AnnAssign) and "|" in ast.unparse(child.annotation):
                    ignored.add(child.lineno)
            walk(child, inner)

    walk(ast.parse(text), "")
    return functions, ignored


def draw(mutants: list[Mutant], count: int, generator: random.Random) -> list[Mutant]:
    """Draw mutants evenly over functions, and in a function evenly over lines."""
    by_function: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_function[mutant.path, mutant.function].append(mutant)
    drawn: list[Mutant] = []
    while by_function and len(drawn) < count:
        for key in generator.sample(sorted(by_function), len(by_function)):
            left = by_function[key]
            line = generator.choice(sorted({mutant.line for mutant in left}))
            chosen = generator.choice([mutant for mutant in left if mutant.line == line])
            left.remove(chosen)
            drawn.append(chosen)
            if not left:
                del by_function[key]
            if len(drawn) == count:
                break
    return drawn


def copied(directory: Path) -> Path:
    """Copy what tests need, for one mutant at a time."""
    for name in ("dataload", "tests", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
        shutil.copy(ROOT / name, directory / name)
    return directory


def tried(mutant: Mutant, copies: SimpleQueue[Path], given: list[str] | None) -> tuple[str, str]:
    """Plant a mutant in a copy, and run its tests; return the outcome, and the change of its line."""
    copy = copies.get()
    try:
        path = copy / mutant.path
        before = path.read_text()
        operator = cosmic_ray.plugins.get_operator(f"core/{mutant.operator}")()
        after = mutate_code(before, operator, mutant.occurrence)
        if after is None or after == before:
            return "killed", "nothing has changed"
        old, new = (text.splitlines() for text in (before, after))
        at = next(number for number, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
        difference = f"{mutant.path} {mutant.function}: {old[at].strip()} -> {new[at].strip()}"
        tests = by_name(mutant.path, given) if given else tests_of(mutant.path, mutant.line)
        if not tests:
            return "not covered", difference
        path.write_text(after)
        try:
            slow = [test for test in tests if test.startswith("tests/integration")]
            quick = [test for test in tests if test not in slow]
            outcome = run_tests(copy, quick) if quick else "survived"
            return run_tests(copy, slow) if slow and outcome == "survived" else outcome, difference
        finally:
            path.write_text(before)
    finally:
        copies.put(copy)


def run_tests(copy: Path, tests: list[str]) -> str:
    chosen = copy / "chosen.txt"
    chosen.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-n", "0"]
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [*command, "--timeout", "30", f"@{chosen}"],
        cwd=copy,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return "survived" if process.wait(SECONDS) in (0, 5) else "killed"
    except subprocess.TimeoutExpired:
        return "undecided"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # and what its tests have started
        process.wait()


@cache
def _tests_by_line(path: str) -> dict[int, list[str]]:
    """Return the tests that ran each line of a file."""
    data = coverage.CoverageData(str(covering()))
    data.read()
    return data.contexts_by_lineno(str(ROOT / path))


def tests_of(path: str, line: int) -> list[str]:
    """Return the tests of a line: those of its module first, those that run little of the file before others."""
    by_line = _tests_by_line(path)
    lines_of = Counter(test for tests in by_line.values() for test in tests)
    found = {test.removesuffix("|run"): lines_of[test] for test in by_line.get(line, ()) if test.endswith("|run")}
    stem, folder = Path(path).stem.strip("_"), path.split("/")[1]

    def near(test: str) -> int:
        file = test.partition("::")[0]
        return 0 if stem in Path(file).stem else 1 if f"/{folder}/" in file else 2 if "/unit/" in file else 3

    return sorted(found, key=lambda test: (near(test), found[test], test))[:MOST_TESTS]


def by_name(path: str, among: list[str]) -> list[str]:
    """Return the test files that share most words with a module: in their names, their folders and their imports."""
    module = Path(path).with_suffix("")
    words = {part.strip("_") for part in module.parts[1:]}
    imports = [".".join(module.parts[: depth + 1]) for depth in range(1, len(module.parts))]
    alike: dict[str, int] = {}
    for file in {file for name in among for file in [ROOT / name, *ROOT.glob(f"{name}/**/*.py")]}:
        if file.name.startswith("test_"):
            text = file.read_text()
            of_names = words & {*file.parts, file.stem.removeprefix("test_"), *file.stem.split("_")}
            score = len(of_names) + (module.stem.strip("_") in of_names) + sum(each in text for each in imports)
            alike[file.relative_to(ROOT).as_posix()] = score
    return (
        sorted((file for file in alike if alike[file]), key=lambda file: (-alike[file], file.count("/"), file))[
            :MOST_FILES
        ]
        + ALWAYS
    )


def report(results: Counter[tuple[str, str]]) -> None:
    """Print the score of each room, with Wilson's 95% interval."""
    rooms = sorted({room for room, _ in results})
    print(f"{'room':12} {'mutants':>8} {'killed':>7} {'accepted':>9} {'score':>7}  95% interval")
    for name, chosen in [*((room, [room]) for room in rooms), ("all", rooms)]:
        of = lambda outcome, chosen=chosen: sum(results[room, outcome] for room in chosen)  # noqa: E731
        count = sum(number for (room, _), number in results.items() if room in chosen) - of("accepted")
        killed = of("killed")
        share, z = killed / max(1, count), 1.96
        middle = (share + z * z / (2 * max(1, count))) / (1 + z * z / max(1, count))
        half = z * math.sqrt(share * (1 - share) / max(1, count) + z * z / (4 * max(1, count) ** 2))
        half /= 1 + z * z / max(1, count)
        print(
            f"{name:12} {count:8} {killed:7} {of('accepted'):9} {share:7.1%}  {max(0.0, middle - half):.1%} to "
            f"{min(1.0, middle + half):.1%}"
        )


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(code)
