"""``dataload fleet``: the workers of loaders on a Ray cluster."""

from dataclasses import asdict
from typing import Annotated, Any, TypeAlias

import typer
from rich.filesize import decimal

from dataload.cli.options import JsonFlag, command_group
from dataload.cli.output import count_of, print_json, print_line, print_table
from dataload.errors import ConfigError

Address: TypeAlias = Annotated[
    str | None, typer.Option(help="The Ray cluster. Default: RAY_ADDRESS, or the one that runs on this machine.")
]

_RIGHT = ("process", "loaders", "queue", "made", "bytes")
_COLUMNS = {name: "right" if name in _RIGHT else "left" for name in ("fleet", "node", *_RIGHT)}

fleet_command: Any = command_group("Show and end the workers of loaders on a Ray cluster.")


@fleet_command.command("status")
def status_command(address: Address = None, json: JsonFlag = False) -> None:
    """List the workers of all fleets: their nodes, the loaders that use them, the batches they are asked for, bytes."""
    from dataload.ray.cluster import list_actors  # needs Ray

    reports = list_actors(address)
    if json:
        print_json([asdict(report) for report in reports])
        return
    if not reports:
        print_line("no fleet has a worker here")
        return
    rows = [asdict(each) | {"fleet": f"{each.fleet}/{each.number}", "bytes": decimal(each.bytes)} for each in reports]
    print_table(_COLUMNS, [tuple(str(row[name]) for name in _COLUMNS) for row in rows])


@fleet_command.command("stop")
def stop_command(name: Annotated[str, typer.Argument(help="Name of the fleet.")], address: Address = None) -> None:
    """End all workers of a fleet. Loaders that still use it start others."""
    from dataload.ray.cluster import stop_fleet  # needs Ray

    ended = stop_fleet(name, address)
    if not ended:
        raise ConfigError(f"there is no fleet {name!r}: `dataload fleet status` lists them", key="name", value=name)
    print_line(f"ended {count_of(ended, 'worker', 'workers')} of {name}")
