"""Interleaved timing: machines drift, so every case is measured in every round, and ratios are taken within rounds."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS = 7


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes:
        name: As the table shows it.
        run: Does the work and returns a checksum of what it read.
        floor: The ratio to the first case that is aimed at, if any.
        least: The items per second that are aimed at, if any.
        items: How many one run does, if not as many as the others'; then its checksum is not compared.
    """

    name: str
    run: Callable[[], object]
    floor: float | None = None
    least: float | None = None
    items: int | None = None


def compare(title, cases, *, items, steps, rounds=ROUNDS):
    """Time `cases` in turn and print each one's rate and its ratio to the first; returns rows for JSON."""
    checksums = [case.run() for case in cases]  # also warms up
    for case, checksum in zip(cases[1:], checksums[1:], strict=True):
        same = case.items is not None or checksum is None or checksum == checksums[0]
        assert same, f"{title}: {case.name} read something else than {cases[0].name}"
    seconds = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            gc.collect()
            start = time.perf_counter_ns()
            case.run()
            seconds[case.name].append((time.perf_counter_ns() - start) / 1e9)
    base = seconds[cases[0].name]
    rows = []
    print(f"\n{title}")
    print(f"  {'':44} {'records/s':>12} {'us/batch':>9} {'ratio':>6}  {'spread':>11}  aim")
    for case in cases:
        done = items if case.items is None else case.items
        times = [t * items / done for t in seconds[case.name]]  # as if it had done as many as the others
        ratios = [b / t for b, t in zip(base, times, strict=True)]
        median, ratio = statistics.median(times), statistics.median(ratios)
        print(
            f"  {case.name:44} {items / median:12,.0f} {median / steps * 1e6:9.1f} {ratio:6.2f}"
            f"  {min(ratios):5.2f}-{max(ratios):5.2f}  {verdict(case, ratio, items / median)}"
        )
        rows.append(
            {
                "title": title,
                "case": case.name,
                "records_per_second": items / median,
                "ratio": ratio,
                "aim": case.floor or case.least,
                "met": met(case, ratio, items / median),
            }
        )
    return rows


def met(case, ratio, rate):
    """Whether a case reached what it aims at; None where it aims at nothing."""
    if case.floor is None and case.least is None:
        return None
    return ratio >= (case.floor or 0) and rate >= (case.least or 0)


def verdict(case, ratio, rate):
    """The aim in words."""
    aims = [f">= {case.floor}"] if case.floor is not None else []
    aims += [f">= {case.least:,.0f}/s"] if case.least is not None else []
    return f"{', '.join(aims)}  {'met' if met(case, ratio, rate) else 'NOT MET'}" if aims else ""
