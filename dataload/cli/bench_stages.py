"""``dataload bench --loader``: where the time of a config goes."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dataload._util.checks import check_directory
from dataload.bench.stages import StageReport, measure_stages
from dataload.cli.output import ProgressBar, print_line, print_table
from dataload.errors import ConfigError


def time_stages(
    config: str, overrides: Sequence[str], seconds: float, repeats: int, json: str | None, given: Mapping[str, Any]
) -> None:
    """Measure the stages of a config and print them.

    Args:
        config: Path of the config.
        overrides: Overrides of the config.
        seconds: Length of each measurement, approximately.
        repeats: Number of rounds.
        json: File for the figures, or None.
        given: Other options of the command line, by name; none of them may be set.

    Raises:
        ConfigError: An option does not go together with a config, or the config is wrong.
    """
    for name, value in given.items():
        if value:
            raise ConfigError(f"--loader measures a config and nothing else: leave {name} out", key="loader")
    if json is not None:
        check_directory(json, "json")
    with ProgressBar(f"measuring {config}"):
        report = measure_stages(config, overrides=overrides, seconds=seconds, repeats=repeats)
    print_table({"stage": "left", "records/s": "right", "us/batch": "right", "more": "right"}, _rows(report))
    for note in report.notes:
        print_line(f"note: {note}")
    print_line(report.verdict, "bold")
    if json is not None:
        Path(json).write_text(json_module.dumps(asdict(report), indent=1), "utf-8")
        print_line(f"written to {json}")


def _rows(report: StageReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    before = 0.0
    for stage in report.stages:
        took = stage.batch_seconds.median * 1e6
        more = f"{took - before:+,.1f}" if stage.name.startswith("+") else ""
        rows.append((stage.name, f"{stage.rows_per_second:,.0f}", f"{took:,.1f}", more))
        before = took
    return rows
