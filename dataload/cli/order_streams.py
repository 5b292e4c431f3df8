"""The report of ``dataload order`` on streams, which are judged by continuity instead of mixing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from dataload.analysis.pictures import stream_figure
from dataload.cli.output import count_of, print_line
from dataload.samplers.streams.report import StreamPlanner, StreamReport, follow, stream_report

_SHOWN_STEPS = 3
_SHOWN_ROWS = 10

Judgement: TypeAlias = tuple[dict[str, Any], Callable[[str], Any], Callable[[], None]]
"""The facts that ``--json`` prints, a function that draws them under a title, and one that prints them as text."""


def judge_streams(planner: StreamPlanner, epoch: int) -> Judgement:
    """Judge the streams of an epoch. In ``first_rows``, each row of a step is its ``stream_id`` and ``offset``."""
    report = stream_report(planner, epoch=epoch)
    first = follow(planner, range(min(_SHOWN_STEPS, report.steps)), epoch=report.epoch)
    facts = {
        "order": repr(planner),
        "records": planner.records,
        "steps": report.steps,
        "world_size": planner.world_size,
        "first_rows": np.stack([first.stream_id, first.offset], axis=2)[:, :_SHOWN_ROWS].tolist(),
        "streams": report.to_json(),
    }
    return facts, partial(stream_figure, planner, report), partial(_print, facts, report)


def _print(facts: dict[str, Any], report: StreamReport) -> None:
    lengths = f"{report.shortest:,} to {report.longest:,} records"
    if report.shortest == report.longest:
        lengths = count_of(report.longest, "record")
    chunks = f", {report.chunk:,} records per row" if report.chunk > 1 else ""
    print_line(facts["order"], "bold")
    print_line(
        f"{count_of(facts['records'], 'record')} in {count_of(report.sequences, 'sequence')} of {lengths}; "
        f"epoch {report.epoch} has {count_of(report.steps, 'step')} of {count_of(report.rows, 'row')} on "
        f"{count_of(facts['world_size'], 'rank')}{chunks}"
    )
    print_line("sequence:offset of the first record in each row")
    for step, rows in enumerate(facts["first_rows"]):
        shown = ("-" if stream_id < 0 else f"{stream_id}:{offset}" for stream_id, offset in rows)
        print_line(f"step {step}: {' '.join(shown)}{' ...' if len(rows) < report.rows else ''}")
    print_line()
    print_line(f"continuing: {_continuing(report)}")
    print_line(f"beginnings: {_beginnings(report)}")
    print_line(f"sequences: each step has rows from {report.per_batch:.1f} different sequences")
    print_line(f"filler: {f'{report.filler:.1%} of the slots hold no record' if report.filler else 'none'}")
    print_line(f"multiplicity: {report.multiplicity.verdict}")
    if report.sampled:
        print_line(f"note: all figures are from a sample of {count_of(report.looked_at, 'step')}")


def _continuing(report: StreamReport) -> str:
    if report.continuing == report.rows:
        return "all rows"
    return f"{report.continuing:,} of {count_of(report.rows, 'row')}; the others take chunks from anywhere"


def _beginnings(report: StreamReport) -> str:
    if report.run_steps is None or report.run_records is None:
        return "none" if report.continuing else "every chunk, because no row continues"
    return (
        f"a row starts a new sequence every {report.run_steps:.1f} steps ({report.run_records:.1f} records) on "
        f"average, {count_of(report.beginnings, 'time')} in total"
    )
