"""benchmarks/instructions.py: what it reads from the tools, and that its loops run. Counting takes minutes."""

import json

import pytest

from benchmarks import instructions

PERF, CALLGRIND = instructions.COUNTERS


def fake(counter, script):
    """A tool that writes to standard error what the real one would; the command to be counted is its $0."""
    return counter._replace(command=("sh", "-c", script))


@pytest.mark.parametrize("name", instructions.CASES)
def test_the_loops_run(name):
    instructions.run_loops(name, 2)


@pytest.mark.parametrize(
    ("counter", "said", "count"),
    [
        (PERF, "123456789;;instructions:u;1000;100.00;;", 123_456_789),
        (PERF, "<not supported>;;instructions:u;0;100.00;;", None),
        (CALLGRIND, "==7== Events    : Ir\n==7== Collected : 380895884\n==7==", 380_895_884),
        (CALLGRIND, "valgrind: no such tool", None),
    ],
)
def test_what_the_tools_say(counter, said, count):
    assert fake(counter, f"echo '{said}' >&2").count(["true"]) == count
    assert fake(counter, f"echo '{said}' >&2; exit 1").count(["true"]) is None


def test_the_first_tool_that_counts_is_taken():
    blind, seeing = fake(PERF, "echo '<not supported>;;instructions:u' >&2"), fake(PERF, "echo '5;;instructions:u' >&2")
    missing = PERF._replace(command=("no-such-tool",))
    assert instructions.find_counter((missing, blind, seeing)) == seeing
    assert instructions.find_counter((missing, blind)) is None


def test_the_start_of_python_is_not_counted():
    """A tool that sees 1,000,000 instructions at the start and 51,200 in each loop of 256 samples."""
    name = "collate of 256, a sample"
    counter = PERF._replace(command=("sh", "-c", 'echo "$((1000000 + 51200 * $4));;instructions:u" >&2'))
    assert instructions.instructions_per_item(counter, name) == 200
    with pytest.raises(RuntimeError, match="perf gave no count of 'collate of 256, a sample'"):
        instructions.instructions_per_item(fake(PERF, "true"), name)


def test_where_nothing_counts(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(instructions, "find_counter", lambda: None)
    instructions.main(["--json", str(tmp_path / "x.json")])
    assert capsys.readouterr().out.startswith("instructions cannot be counted here")
    assert not list(tmp_path.iterdir())


def test_the_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(instructions, "find_counter", lambda: PERF)
    monkeypatch.setattr(instructions, "instructions_per_item", lambda counter, name: 12.5)
    instructions.main(["collate", "Global", "--json", str(tmp_path / "x.json")])
    found = json.loads((tmp_path / "x.json").read_text())
    names = "GlobalShuffle.indices, an index", "collate of 256, a sample"
    title = "instructions, counted by perf"
    assert found["rows"] == [{"title": title, "case": name, "instructions": 12.5} for name in names]
    assert capsys.readouterr().out.count("12.5") == 2
