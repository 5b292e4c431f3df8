"""What ``dataload order`` says of rows that continue: that they mix badly is no news."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataload.cli.output import count_of, print_line
from dataload.samplers.streams.report import StreamPlanner, StreamReport, follow

__all__ = ["print_streams", "stream_facts"]

_SHOWN_STEPS = 3
_SHOWN_ROWS = 10


def stream_facts(planner: StreamPlanner, report: StreamReport) -> dict[str, Any]:
    """All that is known of it, as JSON. A pair of `first_rows` is a row's ``stream_id`` and ``offset``."""
    first = follow(planner, range(min(_SHOWN_STEPS, report.steps)), epoch=report.epoch)
    return {
        "order": repr(planner),
        "records": planner.records,
        "steps": report.steps,
        "world_size": planner.world_size,
        "first_rows": np.stack([first.stream_id, first.offset], axis=2)[:, :_SHOWN_ROWS].tolist(),
        "streams": report.to_json(),
        "picture": None,
    }


def print_streams(facts: dict[str, Any], report: StreamReport) -> None:
    """The facts as text."""
    print_line(facts["order"], "bold")
    print_line(
        f"{count_of(facts['records'], 'record')} in {count_of(report.sequences, 'sequence')} of {_extent(report)}; "
        f"epoch {report.epoch} has {count_of(report.steps, 'step')} of {count_of(report.rows, 'row')} on "
        f"{count_of(facts['world_size'], 'rank')}{_chunks(report)}"
    )
    print_line("sequence:offset of the first record of each row")
    for step, rows in enumerate(facts["first_rows"]):
        shown = ("-" if stream_id < 0 else f"{stream_id}:{offset}" for stream_id, offset in rows)
        print_line(f"step {step}: {' '.join(shown)}{' ...' if len(rows) < report.rows else ''}")
    print_line()
    for name, verdict in _verdicts(report).items():
        print_line(f"{name}: {verdict}")
    if report.sampled:
        print_line(f"note: all figures are from a sample of {count_of(report.looked_at, 'step')}")
    if facts["picture"] is not None:
        print_line(f"picture in {facts['picture']}")


def _extent(report: StreamReport) -> str:
    if report.shortest == report.longest:
        return count_of(report.longest, "record")
    return f"{report.shortest:,} to {report.longest:,} records"


def _chunks(report: StreamReport) -> str:
    return f", {report.chunk:,} records a row" if report.chunk > 1 else ""


def _verdicts(report: StreamReport) -> dict[str, str]:
    return {
        "continuing": _continuing(report),
        "beginnings": _beginnings(report),
        "sequences": f"the rows of a step follow {report.per_batch:.1f} different sequences",
        "filler": f"{report.filler:.1%} of the places hold no record" if report.filler else "none",
        "multiplicity": report.multiplicity.verdict,
    }


def _continuing(report: StreamReport) -> str:
    if report.continuing == report.rows:
        return "all rows"
    return f"{report.continuing:,} of {count_of(report.rows, 'row')}; the others take chunks from anywhere"


def _beginnings(report: StreamReport) -> str:
    if report.run_steps is None or report.run_records is None:
        return "none" if report.continuing else "each chunk, for no row continues"
    return (
        f"a row begins anew every {report.run_steps:.1f} steps ({report.run_records:.1f} records) on average, "
        f"{count_of(report.beginnings, 'time')} in all"
    )
