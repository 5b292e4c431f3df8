"""Write examples/grafana.json, a board for Grafana of the metrics of `dataload.telemetry`: make dashboard."""

from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableHide, VariableRefresh

BOARD = Path(__file__).parents[1] / "examples" / "grafana.json"
PROMETHEUS = DataSourceRef(type_val="prometheus", uid="$datasource")


def total(name: str) -> str:
    """Return the query of a counter of the chosen loaders."""
    return f'dataload_{name}_total{{loader=~"$loader"}}'


def rate(name: str) -> str:
    """Return the query of a counter's rate."""
    return f"rate({total(name)}[$__rate_interval])"


LOOP = f"({rate('wait_seconds')} + {rate('consumer_seconds')})"
WAITS = f"{rate('wait_seconds')} / {LOOP}"
HITS, MISSES = total("cache_hits"), total("cache_misses")
RANK = "{{loader}}, rank {{rank}}"

# Title, unit, description, query and legend.
PANELS = (
    ("Wait for data", "percentunit", "Share of its time that each rank waits for batches.", WAITS, RANK),
    ("The rank that waits most", "percentunit", "The others wait for this one.", f"topk(1, {WAITS})", RANK),
    ("Batches", "cps", "Batches a second.", rate("batches"), RANK),
    ("Bytes", "Bps", "Bytes of batches a second.", rate("batch_bytes"), RANK),
    (
        "Ready batches",
        "short",
        "Mean number that was ready at a request; near 0 if workers are late.",
        f"{rate('queue_depth')} / {rate('batches')}",
        RANK,
    ),
    (
        "Busy workers by stage",
        "short",
        "Mean number of workers in each stage.",
        rate("stage_seconds"),
        f"{RANK}: {{{{stage}}}}",
    ),
    (
        "Busy share of workers",
        "percentunit",
        "Near 1 if workers are the limit.",
        f"sum by (loader, rank) ({rate('stage_seconds')}) / sum by (loader, rank) ({rate('worker_seconds')})",
        RANK,
    ),
    ("Workers", "short", "Workers in use.", 'dataload_workers{loader=~"$loader"}', RANK),
    ("Bad records", "cps", "Records a second that were dropped or replaced.", rate("bad_records"), RANK),
    ("Downloads", "Bps", "Bytes a second from object stores.", rate("download_bytes"), RANK),
    (
        "Requests",
        "reqps",
        "Requests a second to object stores.",
        rate("download_requests"),
        RANK,
    ),
    (
        "Refused and repeated requests",
        "reqps",
        "Responses 429 and 503, and repeated requests, a second.",
        f"{rate('download_throttled')} + {rate('download_retries')}",
        RANK,
    ),
    ("Shards found in the cache", "percentunit", "Since the start.", f"{HITS} / ({HITS} + {MISSES})", RANK),
    (
        "Records of each source",
        "cps",
        "Records a second that a mixture takes from each source, on all ranks.",
        f"max by (loader, source) ({rate('source_records')})",
        "{{loader}}: {{source}}",
    ),
    (
        "Share of each source",
        "percentunit",
        "By the weights of a mixture now.",
        'max by (loader, source) (dataload_source_share{loader=~"$loader"})',
        "{{loader}}: {{source}}",
    ),
)


def board() -> dashboard.Dashboard:
    """Return the board."""
    made = (
        dashboard.Dashboard("dataload")
        .uid("dataload")
        .tags(["dataload"])
        .refresh("30s")
        .time("now-1h", "now")
        .with_variable(
            dashboard.DatasourceVariable("datasource")
            .label("Prometheus")
            .type("prometheus")
            .hide(VariableHide.DONT_HIDE)
        )
        .with_variable(
            dashboard.QueryVariable("loader")
            .datasource(PROMETHEUS)
            .query("label_values(dataload_batches_total, loader)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    for title, unit, description, query, legend in PANELS:
        panel = timeseries.Panel().title(title).description(description).unit(unit).datasource(PROMETHEUS).min(0)
        panel = panel.legend(common.VizLegendOptions().show_legend(True)).height(8).span(8)
        made = made.with_panel(panel.with_target(prometheus.Dataquery().expr(query).legend_format(legend).ref_id("A")))
    return made


def text() -> str:
    """Return the board as JSON."""
    return JSONEncoder(sort_keys=True, indent=2).encode(board().build()) + "\n"


if __name__ == "__main__":
    BOARD.write_text(text())
