"""A coverage-guided fuzzer over all parsers: ``make fuzz MINUTES=5``, or ``TARGETS='tar npy'`` for some of them.

Each target runs in a process of its own with little memory and little time for one input, so that a crash, a hang and
a huge allocation are seen. What was found lies in build/fuzz/TARGET/found: repair the parser, and move the input to
tests/golden/fuzz/TARGET, from where tests/properties/test_hostile.py replays it. The inputs that reached new code are
kept in build/fuzz/TARGET/corpus, and the next run begins with them.
"""

# ruff: noqa: T201 - a script that tells how far it is

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "fuzz"
MOST_BYTES = 3 << 30  # of address space; numpy and the package itself take about one
MOST_SECONDS = 10  # for one input


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("targets", nargs="*", help="names; all by default")
    arguments.add_argument("--minutes", type=float, default=5, help="for all of them together")
    arguments.add_argument("--child", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.child:
        fuzz(given.child, int(given.minutes * 60))
        return 0
    known = known_targets()
    names = given.targets or known
    if unknown := [name for name in names if name not in known]:
        arguments.error(f"there is no target {', '.join(unknown)}; there are {', '.join(known)}")
    at_once = os.cpu_count() or 1
    seconds = max(2, int(given.minutes * 60 * min(at_once, len(names)) / len(names)))
    print(f"{len(names)} targets, {seconds} s each, {at_once} at once")
    with ThreadPoolExecutor(at_once) as pool:
        found = sum(pool.map(lambda name: watch(name, seconds), names))
    print(f"{found} inputs found; see {PLACE}" if found else "nothing found")
    return 1 if found else 0


def known_targets() -> list[str]:
    from targets import TARGETS

    return list(TARGETS)


def watch(name: str, seconds: int) -> int:
    """Run one target; returns how many inputs it fails on."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        command = [sys.executable, __file__, "--child", name, "--minutes", str(seconds / 60)]
        environment = {**os.environ, "TMPDIR": directory, "OPENBLAS_NUM_THREADS": "1", "XDG_CACHE_HOME": directory}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds + 120
            )
            output, code = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            output, code = f"{error}: it hangs where no signal reaches it", 1
    found = sorted((PLACE / name / "found").glob("*"))
    counts = re.findall(r"#(\d+)\s.*?cov: (\d+)", output)
    tried, reached = counts[-1] if counts else ("0", "0")
    print(
        f"{name:18} {tried:>10} inputs, coverage {reached:>5}, {'FOUND' if code or found else 'nothing found'}",
        flush=True,
    )
    if code:
        (PLACE / name).mkdir(parents=True, exist_ok=True)
        (PLACE / name / "output.txt").write_text(output)
        print("\n".join(f"    {line}" for line in output.splitlines()[-25:]), flush=True)
    return max(len(found), int(code != 0))


def fuzz(name: str, seconds: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["dataload", "targets"]):
        from targets import TARGETS
    run, seeds = TARGETS[name]
    corpus, found = PLACE / name / "corpus", PLACE / name / "found"
    for directory in (corpus, found):
        directory.mkdir(parents=True, exist_ok=True)
    kept = (ROOT / "tests" / "golden" / "fuzz" / name).glob("*")
    for data in [*seeds(), *(path.read_bytes() for path in kept)]:
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    longest = max((path.stat().st_size for path in corpus.iterdir()), default=0)
    options = [
        f"-max_total_time={seconds}", f"-timeout={MOST_SECONDS}", f"-rss_limit_mb={MOST_BYTES >> 20}",
        f"-artifact_prefix={found}/", f"-max_len={max(4096, longest)}", "-print_final_stats=1",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], str(corpus), *options], run)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
