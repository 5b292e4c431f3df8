"""The report: self-contained, complete, harmless whatever stands in it; its pictures draw what was measured."""

import base64
import dataclasses
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from figures import assert_no_overlap
from matplotlib.colors import same_color, to_rgb
from matplotlib.container import BarContainer, ErrorbarContainer

from dataload.bench.report import as_svg, curves_figure, rates_figure, report
from dataload.bench.results import Curve, FileFacts
from dataload.bench.table import FILE_COLUMNS, RATE_COLUMNS, file_rows, rate_rows
from dataload.errors import MissingDependencyError

pytestmark = pytest.mark.usefixtures("fonts")


class Page(HTMLParser):
    """The tags of a page, its texts, and the rows of its tables."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.rows, self.texts = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif self.open and self.open[-1] != "style":
            self.texts.append(data.strip())


@pytest.fixture(scope="module")
def results(made):
    return made.results(
        made.limit(1000, 1000),
        made.ours(500, 600, options={"executor": "threads"}),
        made.peer(200, 210, workers=2),
        made.peer(name="DALI", error="nvidia-dali is not installed"),
        made.ours(5, workload="blobs"),
        files=[FileFacts("floats", "syrah", 10, 1234, 0.5), FileFacts("blobs", "tar", 3, 99, None)],
        curves=[
            Curve("Orders: one index", "records", "ns", {"global": ((1e3, 5.5), (1e6, 6.0)), "pool": ((1e6, 9.0),)})
        ],
    )


@pytest.fixture(scope="module")
def text(results, fonts):
    return report(results)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_every_row_of_every_table_is_there(results, page):
    for workload in ("floats", "blobs"):
        rows = rate_rows([m for m in results.measurements if m.task.workload == workload])
        files = file_rows([f for f in results.files if f.workload == workload])
        for row in [*rows, *files]:
            assert list(row) in page.rows
    assert page.rows.count(list(RATE_COLUMNS)) == page.rows.count(list(FILE_COLUMNS)) == 2
    assert ["1,000", "5.5", ""] in page.rows
    assert ["1,000,000", "6", "9"] in page.rows


def test_what_was_measured_on_what_and_how(results, page):
    for row in (
        *(["processor", "A processor"], ["cpus", "2"], ["memory", "25.0 GB"], ["numpy", "2.0.0"]),
        *(["executor", "threads"], ["threads", "1"]),  # the latter is what the reading said itself
        ["records/s of each repeat", "[500, 600]"],
    ):
        assert row in page.rows
    assert page.rows.count(["batch_size", "256"]) == len(results.measurements)
    assert {
        results.command,
        f"dataload bench, {results.date}",
        "DALI, syrah, global, 0 workers: nvidia-dali is not installed",
        "limit: copy; best peer: Grain, syrah, global, 2 workers",
    } <= {*page.texts}


def test_it_needs_no_other_file(text, page):
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object", "base"})
    addresses = [value for _, found in page.tags for name, value in found.items() if name in ("src", "href", "srcset")]
    assert len(addresses) == 4, "two pictures, light and dark"
    assert all(address.startswith("data:image/svg+xml;base64,") for address in addresses)
    for attributes in (attributes for tag, attributes in page.tags if tag == "img"):
        svg = base64.b64decode(attributes["src"].partition("base64,")[2]).decode()
        assert ET.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert attributes["alt"]
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style


EVIL = "<script>alert('1')</script>\"'&\x1b[2J"


def test_everything_is_escaped(made):
    answer = made.answer(5, settings={EVIL: EVIL, "list": [EVIL]})
    ours = dataclasses.replace(
        made.ours(name=EVIL, workload=EVIL, format=EVIL, order=EVIL, reading=EVIL, path=EVIL, options={EVIL: EVIL}),
        answers=(answer,),
        error=EVIL,
    )
    results = made.results(
        ours,
        files=[FileFacts(EVIL, EVIL, 1, 1, 1.0)],
        curves=[Curve(EVIL, EVIL, EVIL, {EVIL: ((1.0, 1.0),)})],
        date=EVIL,
        machine={EVIL: EVIL},
        versions={EVIL: EVIL},
        command=EVIL,
    )
    text = report(results)
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not re.search(r"<script|\x1b", text)
    shown = EVIL.replace("\x1b", r"\x1b")
    assert [shown, shown] in page.rows  # a setting
    assert shown in page.texts  # the command


def test_an_empty_run_and_one_without_matplotlib(made, monkeypatch):
    assert "img" not in {tag for tag, _ in Page(report(made.results())).tags}
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match="a picture needs matplotlib"):
        report(made.results(made.ours(1)))


# Pictures


def of_kind(axes, kind):
    return [container for container in axes.containers if isinstance(container, kind)]


def test_a_bar_for_each_reading_and_a_line_for_each_limit(made):
    results = made.results(
        made.limit(1000, 1000, 1000),
        made.limit(9000, 9000, 9000, name="2 threads", workers=2),
        made.ours(400, 500, 700, workers=1),
        made.peer(100, 100, 100),
        made.peer(50, name="LitData", format="litdata"),
        made.peer(error="not installed", name="DALI"),
    )
    figure = rates_figure(results)
    (axes,) = figure.axes
    (bars,) = of_kind(axes, BarContainer)
    assert [bar.get_width() for bar in bars] == [500, 100, 50]
    assert not same_color(*(to_rgb(bar.get_facecolor()[:3]) for bar in bars[:2])), "peers have a colour of their own"
    errors = [segment for error in of_kind(axes, ErrorbarContainer) for segment in error.lines[2][0].get_segments()]
    assert [end[:, 0].tolist() for end in errors] == [[400, 700], [100, 100]], "one repeat has no spread"
    marks = [segment for mark in axes.collections for segment in mark.get_segments() if mark.get_label() == "limit"]
    found = sorted((float(x), round((low + high) / 2)) for (x, low), (_, high) in marks)
    end = axes.get_xlim()[1]
    assert found == [(1000, 0), (1000, 1), (end, 0), (end, 1), (end, 2)], "of its format or of all, and not far away"
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "dataload, syrah, global, 1 worker",
        "Grain, syrah, global, 0 workers",
        "LitData, litdata, global, 0 workers",
    ]
    shown = [text.get_text() for text in axes.texts]
    assert shown == ["500", "0.50", "100", "0.10", "50", "0.05", "records/s", "of the limit"]
    assert axes.get_xlim()[0] == 0, "bars that do not begin at 0 mislead"
    assert axes.get_xlabel() == "records/s"
    keys = [text.get_text() for text in figure.legends[0].get_texts()]
    assert keys == ["dataload", "other loaders", "copy", "2 threads (beyond the right end)"]
    assert figure.texts[0].get_text() == "floats: up to 500 records/s, 0.50 of the limit, 5.0 times as many as Grain"
    assert_no_overlap(figure)


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
        (axes,) = figure.axes
        title = figure.texts[0].get_text() if figure is rates else axes.get_title(loc="left")
        assert title.startswith(r"/data/$\frac$\x1b\nxxx")
        assert len(title) < 150


def test_curves_have_logarithmic_axes(made):
    points = ((1e3, 5.0), (1e6, 50.0))
    figure = curves_figure(
        [
            Curve("Orders", "records", "ns", {"global": points, "pool": ((1e3, 0.0), (1e6, 9.0))}),
            Curve("Opening", "shards", "ms", {}),
            Curve("Nothing", "shards", "ms", {"open": ()}),
        ]
    )
    orders, opening, nothing = figure.axes
    assert (orders.get_xscale(), orders.get_yscale(), opening.get_xscale()) == ("log", "log", "log")
    assert [list(zip(*line.get_data(), strict=True)) for line in orders.lines] == [list(points), [(1e6, 9.0)]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["global", "pool"]
    assert (orders.get_title("left"), orders.get_xlabel(), orders.get_ylabel()) == ("Orders", "records", "ns")
    assert nothing.get_title("left") == "Nothing"
    ET.fromstring(as_svg(figure))
    assert_no_overlap(figure)
