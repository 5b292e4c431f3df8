"""``dataload certify``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any, cast

import typer

from dataload.analysis.certify import Certificate, certify, check_certificate
from dataload.api import record_loader
from dataload.cli.options import (
    ConfigFile,
    Overrides,
    State,
    WorldSize,
    check_new,
    check_steps,
    load_state,
    parse_range,
    ranks_of,
    read_file,
    write_file,
)
from dataload.cli.output import count_of, print_error, print_line
from dataload.errors import ConfigError
from dataload.loader.loader import Loader

DIFFERENT = 1


def certify_command(
    config: ConfigFile,
    overrides: Overrides = None,
    epoch: Annotated[int, typer.Option(min=0, help="Epoch to certify.")] = 0,
    steps: Annotated[str | None, typer.Option(help="Steps to certify: one (10) or a range (0:5).")] = None,
    output: Annotated[str | None, typer.Option("--output", "-O", help="A new file for the certificate.")] = None,
    check: Annotated[str | None, typer.Option(help="Compare with this certificate instead.", metavar="FILE")] = None,
    world_size: WorldSize = None,
    state: State = None,
) -> None:
    """Write hashes of batches, or check that this machine, world size and release serve the same batches.

    Examples:
      dataload certify train.toml --steps 0:100 --output run.json
      dataload certify train.toml --check run.json --world-size 4 --set loader.batch_size=64
    """
    if check is not None and (steps is not None or output is not None or epoch):
        raise ConfigError("--check takes epoch and steps from the certificate: leave --epoch, --steps and --output out")
    if check is None and (steps is None or output is None):
        raise ConfigError("give --steps and --output to write a certificate, or --check to compare with one")
    if output is not None:
        check_new(output, "--output")
    expected = None if check is None else Certificate.from_json(read_file(check, "--check"))
    with ExitStack() as stack:
        loaders: list[Loader[Any]] = []
        while not loaders or len(loaders) < loaders[0].batch_sampler.world_size:
            ranks = world_size if not loaders else loaders[0].batch_sampler.world_size
            settings = [*(overrides or ()), *ranks_of(None if ranks is None else len(loaders), ranks)]
            loader = stack.enter_context(record_loader(config, overrides=settings))
            load_state(loader, state)
            loaders.append(loader)
        if expected is None:
            _write(loaders, epoch, parse_range(cast("str", steps), "--steps"), cast("str", output))
        else:
            _check(loaders, expected)


def _write(loaders: list[Loader[Any]], epoch: int, steps: range, output: str) -> None:
    check_steps(steps, loaders[0].batch_sampler_of(epoch).steps(epoch), epoch, "--steps")
    from dataload import __version__

    write_file(output, certify(loaders, epoch, steps, release=__version__).to_json(), "--output")
    print_line(f"wrote {output}: {count_of(len(steps), 'step')} of epoch {epoch}")


def _check(loaders: list[Loader[Any]], expected: Certificate) -> None:
    difference = check_certificate(expected, loaders)
    steps = f"steps {expected.first}:{expected.first + len(expected.steps)} of epoch {expected.epoch}"
    made = f"dataload {expected.versions.get('dataload')}, numpy {expected.versions.get('numpy')}"
    if difference is None:
        print_line(f"the same batches, bit for bit: {steps} (certified by {made})", "bold")
        return
    print_error(f"other batches than certified by {made}: {difference}")
    raise typer.Exit(DIFFERENT)
