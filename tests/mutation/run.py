"""Small faults planted in the library, each run against the tests that cover it: do they notice?

    make mutants                functions that differ from main, at most 150 mutants
    make mutants SAMPLE=1000    drawn from all rooms, with the score of each

A mutant is a change of one operator, number or condition by cosmic-ray's operators. Mutants are drawn evenly over
functions. The tests of a mutant are those that ran its line in the last `make coverage`, or else the test files that
are named after its module or its folder; those of its module come first. pytest collects them once, and forks for each
mutant. A test that fails without the mutant, too, counts for none. What runs at import is not changed. Survivors that
are equivalent, or that no test should catch, are listed with the reason in accepted.toml.
"""

# ruff: noqa: T201 - a script that tells what it found

from __future__ import annotations

import argparse
import ast
import compileall
import gc
import json
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
from functools import _lru_cache_wrapper, cache
from pathlib import Path
from queue import SimpleQueue
from types import CodeType, FunctionType
from typing import Any, NoReturn

import cosmic_ray.plugins
import coverage
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).parents[2]
ACCEPTED = Path(__file__).with_name("accepted.toml")
ROOMS = (
    *("samplers", "loader", "executors", "streams", "storage"),
    *("convert", "jobs", "torch", "sources", "codecs", "catalog"),
    *("collate", "text", "telemetry", "compat"),
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
MOST_TESTS = 400  # of a mutant
MOST_FILES = 24  # of a mutant
SECONDS = 90  # of a mutant, on a machine that does nothing else
SERVERS = {"object_server", "azure_server", "server"}  # fixtures that take seconds to start: their tests come last


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

    patterns = [f"dataload/{room}{end}" for room in given.rooms for end in ("/**/*.py", ".py")]
    files = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    changed = None if given.sample else changed_lines(given.base)
    found = [mutant for path in files for mutant in mutants_of(path, changed)]
    drawn = draw(found, given.sample or 150, random.Random(given.seed))
    print(f"{len(drawn)} of {len(found)} mutants in {len({(m.path, m.function) for m in found})} functions", flush=True)
    accepted = {entry["mutant"]: entry["reason"] for entry in tomllib.loads(ACCEPTED.read_text())["accepted"]}
    for change in filter(is_out_of_date, accepted):
        print(f"accepted, but no longer in the code: {change}", flush=True)

    results: Counter[tuple[str, str]] = Counter()
    parts = [drawn[number :: given.jobs] for number in range(given.jobs)]
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(given.jobs) as pool:
        lines = SimpleQueue[tuple[Mutant, str, str]]()
        pipes = [os.pipe() for _ in parts]
        for number, (part, (_, writing)) in enumerate(zip(parts, pipes, strict=True)):
            if not os.fork():
                plant(part, Path(directory, str(number)), among, writing)
        for part, (reading, writing) in zip(parts, pipes, strict=True):
            os.close(writing)
            pool.submit(collect, part, reading, lines)
        for mutant, outcome, change in (lines.get() for _ in drawn):
            if outcome != "killed" and change in accepted:
                outcome = "accepted"
            results[mutant.room, outcome] += 1
            if outcome not in ("killed", "accepted"):
                print(f"{outcome}: {mutant.path}:{mutant.line} {mutant.function}\n    {change}", flush=True)
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
                if operator_name == "NumberReplacer" and "stacklevel=" in lines[line - 1]:
                    continue  # mostly from one line of the library to another
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
                    ignored.add(child.lineno)  # annotations, mostly
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
    """Copy what tests need, with the library compiled."""
    for name in ("dataload", "tests", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile", "build_core.py"):
        shutil.copy(ROOT / name, directory / name)
    compileall.compile_dir(directory / "dataload", quiet=1)
    return directory


def collect(mutants: list[Mutant], results: int, into: SimpleQueue[tuple[Mutant, str, str]]) -> None:
    """Read what `plant` writes until its process ends."""
    left = dict(enumerate(mutants))
    with os.fdopen(results) as stream:
        for line in stream:
            number, outcome, change = json.loads(line)
            into.put((left.pop(number), outcome, change))
    for mutant in left.values():
        into.put((mutant, "not tried", ""))


def plant(mutants: list[Mutant], copy: Path, among: list[str] | None, results: int) -> NoReturn:
    """Try mutants one after another in a process of its own; write a line of JSON for each to a descriptor."""
    # Lines that only run in processes of tests are in no test's coverage.
    tests = [(not among and tests_of(each.path, each.line)) or by_name(each.path, among or TESTS) for each in mutants]
    files = sorted({test.partition("::")[0] for chosen in tests for test in chosen})
    copied(copy)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": f"{copy}.tmp"}
    os.mkdir(f"{copy}.tmp")
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path) != ROOT)]
    sys.argv = ["pytest"]  # which children of tests see
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    import pytest

    options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly", "-n", "0", "--timeout", "30"]
    options += ["-m", "not ray"]  # those of `make coverage`, also of the slow suite
    plugin = Planting([*zip(mutants, tests, strict=True)], copy, results)
    pytest.main([*options, *files], plugins=[plugin])
    os._exit(0)


class Planting:
    """Plugin of pytest: collects once, and forks for each mutant, which takes a second less than a start of pytest."""

    def __init__(self, planned: list[tuple[Mutant, list[str]]], copy: Path, results: int) -> None:
        self.planned, self.copy, self.results = planned, copy, results
        self.is_mutant = False
        self.failed = Path(f"{copy}.failed")  # has the name of a test
        self.sound: dict[str, bool] = {}  # whether a test that failed passes without a mutant

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self.is_mutant and report.failed:
            self.failed.write_text(report.nodeid)
            os._exit(1)

    def pytest_runtestloop(self, session: Any) -> bool:
        gc.unfreeze()  # what conftest.py hides from the collector, and so from the next line
        objects = gc.get_objects()
        self.functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
        for each in objects:
            if type(each) is FunctionType and each.__code__.co_filename.startswith(f"{self.copy}/dataload"):
                self.functions[place_of(each.__code__)].append(each)
        assert self.functions, "no mutant would be planted"
        caches = [each for each in objects if type(each) is _lru_cache_wrapper]
        self.caches = [each for each in caches if (each.__module__ or "").startswith("dataload")]
        gc.freeze()  # so that collections of a mutant's process are short
        items = {item.nodeid: item for item in session.items}
        by_file: dict[str, list[Any]] = defaultdict(list)
        for item in session.items:
            by_file[item.nodeid.partition("::")[0]].append(item)
        chosen = [
            sorted(
                (item for test in tests for item in by_file.get(test) or filter(None, [items.get(test)])),
                key=lambda item: not SERVERS.isdisjoint(item.fixturenames),
            )
            for _, tests in self.planned
        ]
        for number, ((mutant, _), own) in enumerate(zip(self.planned, chosen, strict=True)):
            line = json.dumps([number, *self.tried(mutant, own)])
            os.write(self.results, f"{line}\n".encode())
        return True

    def tried(self, mutant: Mutant, items: list[Any]) -> tuple[str, str]:
        """Return whether tests notice a mutant, and the change of its line."""
        path = self.copy / mutant.path
        before, status = path.read_text(), path.stat()
        after = mutated(mutant, before)
        if after is None:
            return "killed", "nothing has changed"
        if not items:
            return "not covered", difference(mutant, before, after)
        items = [item for item in items if self.sound.get(item.nodeid, True)]
        while True:
            path.write_text(after)  # for the processes that tests start
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9 * (1 + mutant.line)))
            outcome = self.run(path, after, items)
            path.write_text(before)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            if outcome != "killed" or self.is_sound(path, before, items):
                return outcome, difference(mutant, before, after)
            items = [item for item in items if self.sound.get(item.nodeid, True)]

    def is_sound(self, path: Path, before: str, items: list[Any]) -> bool:
        """Return whether the test that has just failed passes without a mutant."""
        if not self.failed.exists():
            return True
        name = self.failed.read_text()
        if name not in self.sound:
            self.sound[name] = self.run(path, before, [item for item in items if item.nodeid == name]) == "survived"
        self.failed.unlink()
        return self.sound[name]

    def run(self, path: Path, after: str, items: list[Any]) -> str:
        process = os.fork()
        if not process:
            try:
                os.setsid()
                self.is_mutant = True
                self.swap(path, after)
                for item, following in zip(items, [*items[1:], None], strict=True):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                os._exit(0)
            finally:  # a mutant may be no Python
                os._exit(1)
        share = min(1.0, (os.cpu_count() or 1) / max(1.0, os.getloadavg()[0]))  # of a CPU
        deadline, ended, status = time.monotonic() + SECONDS / share, 0, 0
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
            ended, status = os.waitpid(process, os.WNOHANG)
        with suppress(ProcessLookupError):
            os.killpg(process, 9)  # and what its tests have started
        if not ended:
            os.waitpid(process, 0)
        shutil.rmtree(f"{self.copy}.tmp", ignore_errors=True)
        os.mkdir(f"{self.copy}.tmp")
        return "undecided" if not ended else "killed" if status else "survived"

    def swap(self, path: Path, after: str) -> None:
        """Give the functions of a module that has been imported the code of a mutant."""
        codes = [compile(after, str(path), "exec", dont_inherit=True)]
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            for function in self.functions.get(place_of(code), ()):
                function.__code__ = code
        for cached in self.caches:
            cached.cache_clear()


def place_of(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def mutated(mutant: Mutant, text: str) -> str | None:
    operator = cosmic_ray.plugins.get_operator(f"core/{mutant.operator}")()
    try:
        after = mutate_code(text, operator, mutant.occurrence)
    except AttributeError:  # cosmic-ray cannot replace an exception of a module
        return None
    return None if after == text else after


def difference(mutant: Mutant, before: str, after: str) -> str:
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    old, new = next((old.strip(), new.strip()) for old, new in pairs if old != new)
    return f"{mutant.path} {mutant.function}: {old} -> {new}"


def is_out_of_date(change: str) -> bool:
    """Return whether the line that an accepted mutant changes, or its function, is gone."""
    (path, function), line = change.partition(": ")[0].split(" "), change.partition(": ")[2].partition(" -> ")[0]
    text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
    return f"def {function.rpartition('.')[2]}(" not in text or line not in map(str.strip, text.splitlines())


@cache
def _coverage() -> tuple[dict[str, dict[int, set[str]]], Counter[str]]:
    """Return the tests that ran each line of each file, and how many lines each test ran."""
    data = coverage.CoverageData(str(covering()))
    data.read()
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in data.measured_files():
        below = path.rpartition("/dataload/")[2]  # whichever checkout was measured, or several
        for line, tests in data.contexts_by_lineno(path).items():
            found[below][line] |= {test.partition("|")[0] for test in tests if test}
    return found, Counter(test for by_line in found.values() for tests in by_line.values() for test in tests)


def tests_of(path: str, line: int) -> list[str]:
    """Return the tests of a line: those of its folder first, and those that run little else before others."""
    found, totals = _coverage()
    by_line = found.get(path.removeprefix("dataload/"), {})
    here = Counter(test for tests in by_line.values() for test in tests)
    words = {Path(path).stem.strip("_"), *Path(path).parts[2:-1]}

    def near(test: str) -> int:
        file = test.partition("::")[0]
        return 2 if "/unit/" not in file else 0 if any(word in file for word in words) else 1

    return sorted(by_line.get(line, ()), key=lambda test: (near(test), -here[test] / totals[test], test))[:MOST_TESTS]


def by_name(path: str, among: list[str]) -> list[str]:
    """Return the test files that share most words with a module: in their names, their folders and their imports."""
    module = Path(path).with_suffix("")
    words = {word for part in module.parts[1:] for word in (part.strip("_"), *part.split("_")) if word}
    imports = [".".join(module.parts[: depth + 1]) for depth in range(1, len(module.parts))]
    alike: dict[str, int] = {}
    for file in {file for name in among for file in [ROOT / name, *ROOT.glob(f"{name}/**/*.py")]}:
        if file.name.startswith("test_"):
            text = file.read_text()
            of_names = words & {*file.parts, file.stem.removeprefix("test_"), *file.stem.split("_")}
            score = len(of_names) + (module.stem.strip("_") in of_names) + sum(each in text for each in imports)
            alike[file.relative_to(ROOT).as_posix()] = score
    return (
        sorted(filter(alike.get, alike), key=lambda file: (-alike[file], file.count("/"), file))[:MOST_FILES] + ALWAYS
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
