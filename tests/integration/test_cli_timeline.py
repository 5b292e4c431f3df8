"""``dataload timeline`` as a user runs it."""

import io
import json

import pytest
from typer.testing import CliRunner

from dataload.analysis.pictures import timeline_figure
from dataload.analysis.timeline import CONSUMER, Timeline, TimelineStep
from dataload.cli.app import app


@pytest.fixture(scope="module", autouse=True)
def _fonts():
    """matplotlib keeps the files of fonts open once it has drawn text: no leak of the test that draws first."""
    timeline_figure(Timeline(), "").savefig(io.BytesIO())


def run(*arguments):
    return CliRunner().invoke(app, ["timeline", *map(str, arguments)])


def ok(*arguments):
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


@pytest.fixture
def config(tmp_path):
    """100 records, batches of 8: 13 steps an epoch."""
    path = tmp_path / "train.toml"
    path.write_text(
        '[source]\npath = "range:100"\n[loader]\nbatch_size = 8\nnum_workers = 2\ntransform = ["builtins:dict"]\n'
    )
    return path


def test_a_table_and_a_verdict(config):
    *lines, verdict = ok(config, "--steps", 10, "--model-ms", 20).splitlines()
    assert lines[0].startswith("10 batches, 80 rows, ")
    for stage in ("read", "transform", "collate"):
        assert [line for line in lines if line.startswith(f"  {stage} ")]
    made = [line.split(" made ") for line in lines if " made " in line]
    assert sum(int(rest.split()[0]) for _, rest in made) == 10
    assert {name for name, _ in made} <= {"dataload-0", "dataload-1", CONSUMER}
    assert verdict.startswith("limit: ")


def test_json_has_every_step_and_goes_on_in_the_next_epoch(config):
    facts = json.loads(ok(config, "--steps", 20, "--epoch", 3, "--model-ms", 2, "--json"))
    assert [(s["epoch"], s["step"]) for s in facts["timeline"]["steps"]] == [
        *((3, step) for step in range(13)),
        *((4, step) for step in range(7)),
    ]
    assert facts["statistics"]["steps"] == 20
    assert facts["statistics"]["rows"] == 100 + 7 * 8
    assert facts["statistics"]["verdict"].startswith("limit: ")
    assert facts["statistics"]["stages"]["transform"]["runs"] == 20
    assert (facts["picture"], facts["trace"]) == (None, None)
    work = facts["timeline"]["work"]
    assert len(work) == 19  # the last one has no end: nothing was asked for behind it
    assert all(ended - begun >= 0.002 for begun, ended in work)


def test_settings_are_replaced(config):
    facts = json.loads(ok(config, "--steps", 3, "--set", "loader.num_workers=0", "--json"))
    assert facts["statistics"]["executor"] == "serial"
    assert {step["worker"] for step in facts["timeline"]["steps"]} == {CONSUMER}
    processes = ("--set", "loader.num_workers=1", "--set", "loader.executor=processes")
    facts = json.loads(ok(config, "--steps", 3, *processes, "--json"))
    assert (facts["statistics"]["executor"], facts["timeline"]["workers"]) == ("processes", ["dataload-0"])


def test_a_data_set_that_ends_before(config):
    facts = json.loads(ok(config, "--steps", 100, "--set", "loader.epochs=2", "--json"))
    assert facts["statistics"]["steps"] == 26
    result = run(config, "--epoch", 2, "--set", "loader.epochs=2")
    assert result.exit_code == 2
    assert "has no steps in epoch 2" in result.stderr


def test_a_picture_and_a_trace_are_written(config, tmp_path):
    picture, trace = tmp_path / "t.png", tmp_path / "t.json"
    lines = ok(config, "--steps", 5, "--picture", picture, "--trace", trace).splitlines()
    assert lines[-2:] == [f"wrote {picture}", f"wrote {trace}"]
    assert lines[-3].startswith("limit: ")
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["name"] == "wait" for event in events) == 5
    facts = json.loads(ok(config, "--steps", 5, "--picture", picture, "--trace", trace, "--json"))
    assert (facts["picture"], facts["trace"]) == (str(picture), str(trace))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--picture", "t.txt"], "t.txt: "),
        (["--picture", "none/t.png"], "there is no directory none to write to"),
        (["--trace", "none/t.json"], "there is no directory none to write to"),
        (["--steps", "0"], "Invalid value for '--steps'"),
        (["--model-ms", "-1"], "Invalid value for '--model-ms'"),
        (["--set", "loader.batch_sise=4"], "batch_size"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(config, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dataload.cli.timeline._consume", lambda *_: pytest.fail("it ran"))
    result = run(config, *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_error_of_the_data_is_an_error_of_the_command(config):
    assert run(config, "--set", "loader.transform=[operator:neg]").exit_code == 1


# The picture


def step(number, worker, asked, received, *spans):
    return TimelineStep(0, number, worker, spans, asked, received, rows=4, nbytes=8, bad=0, failed=False)


def drawn(timeline):
    """Of each bar of a picture: what it is, its begin, its length, and the line it is on."""
    (axes,) = timeline_figure(timeline, "title").axes
    lines = {tick: label.get_text() for tick, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    bars = set()
    for collection in axes.collections:
        for path in collection.get_paths():
            (left, bottom), (right, top) = path.get_extents().get_points()
            middle = round((bottom + top) / 2)
            bars.add((collection.get_label(), round(left, 6), round(right - left, 6), lines[middle]))
    return axes, bars


def test_the_picture_has_a_line_for_each_worker_and_one_for_the_consumer():
    timeline = Timeline()
    timeline.steps = [
        step(0, "dataload-0", 100.0, 102.0, ("read", 100.0, 101.0), ("collate", 101.0, 102.0)),
        step(1, "dataload-1", 103.0, 103.0, ("read", 100.5, 102.5)),
        step(2, CONSUMER, 104.0, 106.0, ("read", 104.0, 105.5)),
    ]
    timeline.work = [(102.0, 103.0), (103.0, 104.0)]
    axes, bars = drawn(timeline)
    assert bars == {
        ("read", 0.0, 1.0, "dataload-0"),
        ("collate", 1.0, 1.0, "dataload-0"),
        ("read", 0.5, 2.0, "dataload-1"),
        ("read", 4.0, 1.5, CONSUMER),
        ("consumer waits", 0.0, 2.0, CONSUMER),
        ("consumer waits", 3.0, 0.0, CONSUMER),
        ("consumer waits", 4.0, 2.0, CONSUMER),
        ("consumer works", 2.0, 1.0, CONSUMER),
        ("consumer works", 3.0, 1.0, CONSUMER),
    }
    assert [label.get_text() for label in axes.get_yticklabels()] == ["dataload-0", "dataload-1", CONSUMER]
    assert list(axes.get_yticks()) == [2, 1, 0], "the consumer's is the lowest"
    assert axes.get_xlim() == (0, 6)
    assert {text.get_text() for text in axes.texts} == {"0", "1", "2"}
    (legend,) = axes.figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["consumer waits", "consumer works", "read", "collate"]
    colours = {c.get_label(): tuple(c.get_facecolor()[0]) for c in axes.collections}
    assert len(set(colours.values())) == len(colours) == 4


def test_many_steps_have_no_numbers():
    timeline = Timeline()
    timeline.steps = [step(n, "dataload-0", n, n + 0.5, ("read", n, n + 0.5)) for n in range(500)]
    axes, _ = drawn(timeline)
    assert not axes.texts


def test_a_timeline_of_iterators(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "letters.py").write_text("def letters(word):\n    return iter(word)\n")
    config = tmp_path / "streams.toml"
    config.write_text(
        '[sampler]\nkind = "iterators"\nmake_stream = "letters:letters"\nsequences = ["abc", "defg", "hij", "klmn"]\n'
        "[loader]\nbatch_size = 4\nnum_workers = 2\n"
    )
    found = json.loads(ok(config, "--steps", 6, "--json"))
    assert found["statistics"]["steps"] == 6
    assert len(found["statistics"]["row_seconds"]) == 4
    assert found["timeline"]["workers"] == ["dataload-0", "dataload-1"]
