"""Pictures: what is drawn is what was measured."""

import sys
import xml.etree.ElementTree as ET

import pytest
from matplotlib.colors import same_color, to_rgb
from matplotlib.container import BarContainer, ErrorbarContainer

from dataload.bench.report import as_svg, curves_figure, rates_figure
from dataload.bench.results import Curve
from dataload.errors import MissingDependencyError

pytestmark = pytest.mark.usefixtures("fonts")


def of_kind(axes, kind):
    return [container for container in axes.containers if isinstance(container, kind)]


def test_a_bar_for_each_reading_and_a_line_for_each_limit(made):
    results = made.results(
        made.limit(1000, 1000, 1000),
        made.limit(2000, 2000, 2000, name="2 threads"),
        made.ours(400, 500, 700, workers=1),
        made.peer(100, 100, 100),
        made.peer(error="not installed", name="DALI"),
    )
    (axes,) = rates_figure(results).axes
    (bars,) = of_kind(axes, BarContainer)
    assert [bar.get_width() for bar in bars] == [500, 100]
    assert not same_color(*(to_rgb(bar.get_facecolor()[:3]) for bar in bars)), "peers have a colour of their own"
    (errors,) = of_kind(axes, ErrorbarContainer)
    assert [end[:, 0].tolist() for end in errors.lines[2][0].get_segments()] == [[400, 700], [100, 100]]
    lines = {line.get_label(): line.get_xdata() for line in axes.lines if not line.get_label().startswith("_")}
    assert lines == {"copy": [1000, 1000], "2 threads": [2000, 2000]}
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "dataload, syrah, global, 1 worker",
        "Grain, syrah, global, 0 workers",
    ]
    assert [text.get_text() for text in axes.texts] == ["0.50", "0.10"]
    assert axes.get_xlim()[0] == 0, "bars that do not begin at 0 mislead"
    assert axes.get_xlim()[1] > 2000


@pytest.mark.parametrize("kinds", [[], ["limit"], ["ours"], ["failed"]])
def test_little_to_draw(made, kinds):
    measured = {"limit": made.limit(1000), "ours": made.ours(5), "failed": made.ours(error="gone")}
    figure = rates_figure(made.results(*(measured[kind] for kind in kinds)))
    assert len(figure.axes) == sum(kind != "failed" for kind in kinds)
    ET.fromstring(as_svg(figure))


def test_names_that_are_no_mathematics(made):
    """A path of the user's own may hold dollar signs, and characters that no font has."""
    name = "/data/$\\frac$\x1b\n" + 200 * "x"
    rates = rates_figure(
        made.results(made.limit(1000, workload=name, name=name), made.ours(5, workload=name, name=name))
    )
    curves = curves_figure([Curve(name, name, name, {name: ((1.0, 2.0),)})])
    for figure in (rates, curves):
        ET.fromstring(as_svg(figure))
        (axes,) = (axes for axes in figure.axes if axes.axison)
        title = axes.get_title(loc="left") + axes.get_title()
        assert title.startswith(r"/data/$\frac$\x1b\nxxx")
        assert len(title) < 120


def test_curves_have_logarithmic_axes(made):
    points = ((1e3, 5.0), (1e6, 50.0))
    figure = curves_figure(
        [
            Curve("Orders", "records", "ns", {"global": points, "pool": ((1e3, 0.0), (1e6, 9.0))}),
            Curve("Opening", "shards", "ms", {}),
            Curve("Nothing", "shards", "ms", {"open": ()}),
        ]
    )
    orders, opening, nothing, unused = figure.axes
    assert (orders.get_xscale(), orders.get_yscale(), opening.get_xscale()) == ("log", "log", "log")
    assert [list(zip(*line.get_data(), strict=True)) for line in orders.lines] == [list(points), [(1e6, 9.0)]]
    assert [text.get_text() for text in orders.get_legend().get_texts()] == ["global", "pool"]
    assert (orders.get_title(), orders.get_xlabel(), orders.get_ylabel()) == ("Orders", "records", "ns")
    assert opening.get_legend() is None
    assert nothing.get_title() == "Nothing"
    assert not unused.axison
    ET.fromstring(as_svg(figure))


def test_without_matplotlib(made, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"a picture needs matplotlib.*dataload\[plot\]"):
        rates_figure(made.results())
