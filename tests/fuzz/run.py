"""A fuzzer over all parsers.

    make fuzz MINUTES=5                 guided by coverage (atheris)
    make fuzz MUTANTS=10000             so many mutants of each parser's inputs, always the same ones
    make fuzz TARGETS='tar npy' ...     some of the parsers

Each target runs in a process of its own with little memory and little time for one input, so that a crash, a hang and
a huge allocation are seen. What was found lies in build/fuzz/TARGET/found: repair the parser, and move the input to
tests/golden/fuzz/TARGET, from where tests/properties/test_hostile.py replays it. The inputs that reached new code are
kept in build/fuzz/TARGET/corpus, and the next guided run begins with them.
"""

# ruff: noqa: T201 - a script that tells how far it is

import argparse
import hashlib
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "fuzz"
MOST_BYTES = 3 << 30  # of address space; numpy and the package itself take about one
MOST_SECONDS = 10  # for one input
STUCK_SECONDS = 30  # for one input, if no signal reaches it
MOST_FOUND = 20  # of one target
SEPARATOR = "=" * 20


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("targets", nargs="*", help="names; all by default")
    arguments.add_argument("--minutes", type=float, default=5, help="for all of them together")
    arguments.add_argument("--mutants", type=int, default=0, help="of each target, instead of a search by coverage")
    arguments.add_argument("--first", type=int, default=0, help="number of the first mutant")
    arguments.add_argument("--child", help=argparse.SUPPRESS)
    arguments.add_argument("--progress", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.child and given.mutants:
        try_mutants(given.child, given.first, given.mutants, given.progress)
        return 0
    if given.child:
        fuzz(given.child, int(given.minutes * 60))
        return 0
    known = known_targets()
    names = given.targets or known
    if unknown := [name for name in names if name not in known]:
        arguments.error(f"there is no target {', '.join(unknown)}; there are {', '.join(known)}")
    at_once = os.cpu_count() or 1
    seconds = max(2, int(given.minutes * 60 * min(at_once, len(names)) / len(names)))
    each = f"{given.mutants} mutants" if given.mutants else f"{seconds} s"
    print(f"{len(names)} targets, {each} each, {at_once} at once")
    with ThreadPoolExecutor(at_once) as pool:
        if given.mutants:
            found = sum(pool.map(lambda name: watch_mutants(name, given.first, given.mutants), names))
        else:
            found = sum(pool.map(lambda name: watch(name, seconds), names))
    print(f"{found} inputs found; see {PLACE}" if found else "nothing found")
    return 1 if found else 0


def known_targets() -> list[str]:
    from targets import TARGETS

    return list(TARGETS)


def environment(directory: str) -> dict[str, str]:
    # One arena: those of other threads would take 64 MiB of address space each.
    return {
        **os.environ, "TMPDIR": directory, "OPENBLAS_NUM_THREADS": "1", "XDG_CACHE_HOME": directory,
        "MALLOC_ARENA_MAX": "1",
    }  # fmt: skip


def shared_memory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def watch(name: str, seconds: int) -> int:
    """Run one target; returns how many inputs it fails on."""
    with tempfile.TemporaryDirectory(dir=shared_memory()) as directory:
        command = [sys.executable, __file__, "--child", name, "--minutes", str(seconds / 60)]
        try:
            done = subprocess.run(
                command,
                env=environment(directory),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds + 120,
            )
            output, code = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            output, code = f"{error}: it hangs where no signal reaches it", 1
    found = sorted((PLACE / name / "found").glob("*"))
    counts = re.findall(r"#(\d+)\s.*?cov: (\d+)", output)
    tried, reached = counts[-1] if counts else ("0", "0")
    print(
        f"{name:22} {tried:>10} inputs, coverage {reached:>5}, {'FOUND' if code or found else 'nothing found'}",
        flush=True,
    )
    if code:
        (PLACE / name).mkdir(parents=True, exist_ok=True)
        (PLACE / name / "output.txt").write_text(output)
        print("\n".join(f"    {line}" for line in output.splitlines()[-25:]), flush=True)
    return max(len(found), int(code != 0))


def watch_mutants(name: str, first: int, count: int) -> int:
    """Run mutants of one target, again and again behind one that kills the process; returns how many it fails on."""
    begun, next_one, failures = time.monotonic(), first, []
    while next_one < first + count and len(failures) < MOST_FOUND:
        with tempfile.TemporaryDirectory(dir=shared_memory()) as directory:
            progress = Path(directory, "progress")
            progress.write_bytes(struct.pack("<q", next_one))
            command = [
                sys.executable, __file__, "--child", name, "--mutants", str(first + count - next_one),
                "--first", str(next_one), "--progress", str(progress),
            ]  # fmt: skip
            output_path = Path(directory, "output")
            with output_path.open("wb") as output:
                child = subprocess.Popen(command, env=environment(directory), stdout=output, stderr=output)
                code, at = wait_for(child, progress)
            texts = output_path.read_text(errors="replace").split(SEPARATOR)
            failures += [text.strip() for text in texts[:-1]]
            if code == 0:
                next_one = first + count
            else:
                failures.append(f"mutant {at}: the process ended with code {code}\n{texts[-1][-3000:]}")
                save(name, at)
                next_one = at + 1
    seconds = time.monotonic() - begun
    tried = next_one - first
    print(
        f"{name:22} {tried:>9} mutants, {seconds:6.1f} s, {f'{len(failures)} FOUND' if failures else 'nothing found'}"
    )
    for text in failures[:MOST_FOUND]:
        print("\n".join(f"    {line}" for line in text.splitlines()[-14:]), flush=True)
    return len(failures)


def wait_for(child: subprocess.Popen[bytes], progress: Path) -> tuple[int, int]:
    """Return the exit code of a child, which is killed if it makes no progress, and the number of its last mutant."""
    at, since = -1, time.monotonic()
    while True:
        try:
            code = child.wait(1)
        except subprocess.TimeoutExpired:
            code = None
        (now,) = struct.unpack("<q", progress.read_bytes())
        if code is not None:
            return code, now
        if now != at:
            at, since = now, time.monotonic()
        elif time.monotonic() > since + STUCK_SECONDS:
            child.kill()


def save(name: str, number: int) -> None:
    from mutants import make_mutant

    seeds = known_seeds(name)
    found = PLACE / name / "found"
    found.mkdir(parents=True, exist_ok=True)
    (found / f"mutant-{number}").write_bytes(make_mutant(name, number, seeds))


def known_seeds(name: str) -> list[bytes]:
    from targets import TARGETS

    return [data for data in TARGETS[name][1]() if len(data) <= 200_000]


class TooSlow(BaseException):
    """One input took longer than `MOST_SECONDS`."""


def too_slow(*_: object) -> None:
    raise TooSlow


def try_mutants(name: str, first: int, count: int, progress: str | None) -> None:
    """Run mutants; those that end in a foreign exception are printed and saved."""
    from mutants import make_mutant
    from targets import TARGETS

    run, seeds = TARGETS[name][0], known_seeds(name)
    signal.signal(signal.SIGALRM, too_slow)
    descriptor = os.open(progress or os.devnull, os.O_WRONLY)
    kinds: set[str] = set()
    for number in range(first, first + count):
        data = make_mutant(name, number, seeds)
        os.pwrite(descriptor, struct.pack("<q", number), 0)
        signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
        try:
            run(data)
        except (Exception, TooSlow) as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            last = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} {last.filename}:{last.lineno}"
            if kind not in kinds:
                kinds.add(kind)
                save(name, number)
                print(f"mutant {number}:\n{traceback.format_exc()}\n{SEPARATOR}", flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0)


def fuzz(name: str, seconds: int) -> None:
    import atheris
    from mutants import change

    with atheris.instrument_imports(include=["dataload", "targets"]):
        from targets import TARGETS
    run, seeds = TARGETS[name]
    begun = seeds()
    corpus, found = PLACE / name / "corpus", PLACE / name / "found"
    for directory in (corpus, found):
        directory.mkdir(parents=True, exist_ok=True)
    kept = (ROOT / "tests" / "golden" / "fuzz" / name).glob("*")
    for data in [*begun, *(path.read_bytes() for path in kept)]:
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, resource.RLIM_INFINITY))
    longest = max((path.stat().st_size for path in corpus.iterdir()), default=0)
    options = [
        f"-max_total_time={seconds}", f"-timeout={MOST_SECONDS}", f"-rss_limit_mb={MOST_BYTES >> 20}",
        f"-artifact_prefix={found}/", f"-max_len={max(4096, longest)}", "-print_final_stats=1",
    ]  # fmt: skip

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        if seed % 2:
            return atheris.Mutate(data, longest)
        return change(name, bytearray(data), Random(seed), begun)[:longest]

    atheris.Setup([sys.argv[0], str(corpus), *options], run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
