"""What is wrong with a command is said in a line, before anything is written."""

import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import fail
from written import written

CODE = """
import numpy as np
from dataload import MemorySource

def numbers(count=20):
    return [{"x": i, "name": str(i)} for i in range(count)]

def broken():
    raise OSError("no such disk")

def text():
    return 5

ready = MemorySource({"x": np.arange(10)})
"""
LOADER = "[loader]\nbatch_size = {}\nshuffle = true\nseed = 3\n"
FILES = {
    "my_code.py": CODE,
    "broken_module.py": "1 / 0",
    "long.toml": '[source]\npath = "range:1000"\n' + LOADER.format(16),
    "a.toml": '[source]\npath = "a.syr"\n' + LOADER.format(4),
    "streams.toml": '[sampler]\nkind = "streams"\nlengths = "lengths.npy"\n[source]\npath = "range:9"\n'
    "[loader]\nbatch_size = 1\n",
    "iterators.toml": '[sampler]\nkind = "iterators"\nmake_stream = "itertools:count"\nsequences = ["a"]\n'
    "[loader]\nbatch_size = 1\n",
    "header.csv": "step,value\n1,2\n",
    "letters.csv": "step,loss\n1,high\n",
    "nan.csv": "\ufeffstep,loss\n1,2\n2,nan\n",
    "far.csv": "step,loss\n99999999999,2\n",
    "late.csv": "epoch,step,loss\n0,5,1\n",
    "early.csv": "step,loss\n-1,1\n",
    "empty.csv": "step,loss\n",
    "a.lines": "",
    "a.xyz": "?" * 600,
    "file": "",
}
NO_DIRECTORY = "there is no directory none to write to"
ONE_OF_THREE = "give one of --index, --key and --spike"


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A current directory with a bit of everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        patch.setattr("dataload.analysis.trace._MOST_EPOCHS", 100)  # each of which takes a moment
        for name, text in FILES.items():
            Path(name).write_text(text)
        Path("x.lmdb").mkdir()
        np.save("lengths.npy", [9])
        np.save("tokens.npy", np.arange(9, dtype=np.uint16))
        written("a.syr", [{"x": i} for i in range(20)])
        yield
    for name in ("my_code", "broken_module"):
        sys.modules.pop(name, None)


BENCH = [
    ("x.syr --made tokens", "--made has moved to `python -m benchmarks`"),
    ("", "give a PATH to your data"),
    ("x.syr --executor fibres", "'fibres' is not one of 'threads', 'processes'"),
    ("x.syr --orders globl", "--orders has 'globl'"),
    ("x.syr --workers 1,two", "--workers must be numbers of 0 or more, separated by commas, got '1,two'"),
    ("x.syr --workers -1", "--workers must be numbers of 0 or more"),
    ("x.syr --json none/x.json", "there is no directory none"),
    ("a.syr --formats syrah,sirah", "--formats has 'sirah'"),
    ("a.syr --formats ,", "--formats is empty: give some of"),
    ("/no/such/data.syr", "/no/such/data.syr"),
    ("--loader a.toml", "--loader is gone: `dataload timeline CONFIG` shows where the time of a config goes"),
]

WRONG = [
    ("frob", "No such command 'frob'"),
    # How data are named
    ("inspect", "Missing argument 'PATH'"),
    ("inspect --frob x", "No such option: --frob"),
    ("inspect x --format syra", "did you mean 'syrah'?"),
    ("inspect none.syr", "none.syr"),
    ("inspect '*.none'", "*.none"),
    ("inspect range:10 -o stp=2", "did you mean 'step'?"),
    ("inspect range:10 -o step", "--option 'step': pass name=value"),
    ("inspect range:10 -o a=1 -o a.b=1", "'a.b=1': 'a' already has a value"),
    ("inspect x.lmdb --codec math:nothing", "math has no 'nothing'"),
    ("inspect x.lmdb --decode a=b --decode c", "--decode 'c': pass one decoder for all"),
    ("inspect tokens.npy", "pass --option window=..."),
    ("inspect my_code:numbers --field x", "--field, --codec and --decode are for files"),
    ("inspect my_code:numbesr", "did you mean 'numbers'"),
    ("cache status --cache none", "/none\n"),
    ("cache status none", "there is no directory none"),
    ("cache prune none", "there is no directory none"),
    ("cache prune --all --budget 1GB", "--all keeps nothing: leave --budget out"),
    ("cache prune --budget much", "budget must be a number of bytes such as 500GB or 64MiB, got 'much'"),
    # Conversions and indexes
    ("convert range:3 out.none", "'out.none'"),
    ("convert range:3 file/out.syr", "cannot write to the directory file: file is not a directory"),
    ("convert range:3 x.lmdb", "exists: choose another name, or pass --overwrite to replace it"),
    ("convert range:3 c.tar --to-option indx=false", "did you mean 'index'?"),
    ("convert a.syr b.syr --map my_code", "--map is 'my_code': expected 'module:function'"),
    ("convert a.syr b.syr --map my_code:numbres", "did you mean 'numbers'?"),
    ("convert a.syr b.syr --on-error ignore", "--on-error is 'ignore': choose from raise, skip"),
    ("convert a.syr b.syr --shards 0", "--shards must be an integer >= 1, got 0"),
    ("convert a.syr b.syr --part 3/2", "cannot split 1 shard into 2 parts"),
    ("convert a.syr b.syr --part 1", "--part '1': pass two numbers, such as 2/8 for the second of eight"),
    ("convert a.syr b.syr --part /2", "--part '/2': pass two numbers"),
    ("convert a.syr b.syr --part -1/2", "--part '-1/2': pass two numbers"),
    ("convert a.syr 'b-*.syr'", "'b-*.syr' is a pattern, which cannot be written to"),
    ("convert a.syr b.tar --engine slurm", "--engine 'slurm': pass local or ray"),
    ("convert a.syr b.tar --workers 2", "--workers is for --engine local"),
    ("convert a.syr b.tar --engine local --memory 2GB", "'memory=2GB' is not a setting of local: choose from parts"),
    (
        "convert a.syr b.tar --engine local:2",
        "'2' is not a setting of local: settings are written as in local:parts=64",
    ),
    ("convert a.syr b.tar --engine local:wrkers=2", "'wrkers=2' is not a setting of local: did you mean 'workers'?"),
    ("convert a.syr b.tar --engine local:workers=0", "local:workers=0: num_workers must be an integer >= 1, got 0"),
    ("index -d none a.tar", "there is no directory none"),
    ("index a.tar --codec npz", "--format, --codec, --decode, --part, --merge and --engine are for --manifest\n"),
    ("index a.tar --engine local", "--merge and --engine are for --manifest"),
    ("index a.tar --option codec=x", "--option takes storage_options and remote only, got 'codec'"),
    ("index --manifest a.tar --directory x", "a manifest is written beside its shards: leave --directory out\n"),
    ("index --manifest my_code:numbers", "--manifest is for files, and my_code:numbers has none"),
    ("index --manifest . --engine local --merge", "pass it without part and merge"),
    ("stats a.toml --codec msgpack", "a config says how its data is read: use --set to change it"),
    ("stats . --set loader.batch_size=1", "--set is for configs: use --option"),
    ("stats . --no-save --part 1/2", "parts are kept until they are merged: leave --no-save out"),
    ("stats . --engine local --part 1/2", "an engine runs all parts and merges them"),
    ("stats iterators.toml", "has no section 'source': its streams read the data"),
    ("stats range:3 --engine local", "--engine is for files, and range:3 has none"),
    ("stats my_code:numbers --part 1/2", "--part is for files, and my_code:numbers has none"),
    # Verification
    ("verify range:3 --limit 0", "Invalid value for '--limit'"),
    ("verify a.syr --field z", "'z'"),
    ("verify a.syr --parts 2", "--parts is for --engine local or ray"),
    ("verify a.syr --engine local --part 1/2", "--engine reads all parts: leave --part out"),
    ("verify a.syr --part 1/4", "cannot split 1 shard into 4 parts: ask for fewer parts"),
    ("verify my_code:nombers", "did you mean 'numbers'"),
    ("verify no_such_module:f", "there is no format or module 'no_such_module': choose from array_record"),
    ("verify syra:x", "there is no format or module 'syra': did you mean 'syrah'?"),
    ("verify broken_module:f", "importing 'broken_module' raised ZeroDivisionError: division by zero"),
    ("verify broken_module.inner:f", "importing 'broken_module.inner' raised ZeroDivisionError"),
    ("inspect os:getcwd", "os:getcwd returns 'str', not a source"),
    ("verify my_code:text", "returns 'int', not a source: a source has __len__ and __getitem__"),
    ("verify my_code:numbers -o volume=3", "cannot be called with volume=3: got an unexpected"),
    ("verify line_source:LineSource", "with no options (pass them as -o name=value)"),
    ("verify my_code:ready -o size=3", "is a MemorySource, which does not take --option"),
    ("verify my_code:numbers --field x", "are for files; pass options to my_code:numbers with --option"),
    ("verify my_code:numbers --part 1/2", "--part is for files, and my_code:numbers"),
    # Orders
    ("order none.toml", "none.toml"),
    ("order a.tml", "not '.tml'; if this is data, write a config that names it: [source] path = \"a.tml\""),
    ("order long.toml --set loader.batch_size", "'loader.batch_size'"),
    ("order long.toml --set source.path=tokens.npy", "needs the option 'window': pass --set source.window=...\n"),
    ("order long.toml --set source.path=range:0", "the order has no steps"),
    ("order long.toml --steps 63", "--steps 63 is out of range: epoch 0 has 63 steps"),
    ("order long.toml --steps 0:64", "--steps 0:64 is out of range: epoch 0 has 63 steps"),
    ("order long.toml --steps 3:3", "--steps 3:3 is empty: stop must be greater than start"),
    ("order long.toml --steps -1", "--steps must be a number or start:stop, such as 10 or 0:5, got '-1'"),
    ("order long.toml --steps 0:5:2", "--steps must be a number or start:stop"),
    ("order long.toml --epoch -1", "Invalid value for '--epoch'"),
    ("order long.toml --steps 0 --rank 1", "--rank needs --world-size"),
    ("order long.toml --steps 0 --rank 4 --world-size 4", "--rank must be less than --world-size, 4, got 4"),
    ("order long.toml --rank 0 --world-size 4", "--rank needs --steps: the report covers all ranks together"),
    ("order long.toml --steps 0 --picture a.png", "--steps prints only indices: omit --picture"),
    ("order long.toml --steps 0 --quality 0.5", "--steps prints only indices: omit --quality"),
    ("order long.toml --quality 90", "got 90.0"),
    ("order long.toml --picture a.gif", "a.gif"),
    ("order long.toml --picture none/a.png", "there is no directory none"),
    ("order streams.toml --quality 0.5", "--quality is for shuffled orders"),
    # What a loader gives
    ("show a.toml", "give --step, such as 12345 or 0:3; or --state"),
    ("show a.npy", "or, for a data set, --records"),
    ("show a.toml --step 5", "--step 5 is out of range: epoch 0 has 5 steps"),
    ("show a.toml --step 0 --codec npz", "a config says how its data is read"),
    ("show a.toml --step 0 --rank 1", "--rank needs --world-size"),
    ("show a.toml --step 0 --html none/page.html", NO_DIRECTORY),
    ("show a.toml --step 0 --npz b.npz", "--npz is gone: in Python, numpy.savez(path, **loader.batch(epoch, step))"),
    ("show a.toml --step 0 --tokenizer a.toml", "a.toml is not a tokenizer.json"),
    ("show a.toml --step 0 --set source.path=tokens.npy", "needs the option 'window': pass --set source.window=...\n"),
    ("show a.toml --state b.json", "--state: b.json cannot be read: No such file or directory"),
    ("show a.syr --records 0:21", "--records 0:21 is out of range: the data set has 20 records"),
    ("show a.syr --records 0 --epoch 1", "--records shows a data set: leave out the options for a config"),
    ("timeline a.toml --picture t.txt", "t.txt: "),
    ("timeline a.toml --picture none/t.png", NO_DIRECTORY),
    ("timeline a.toml --trace none/t.json", NO_DIRECTORY),
    ("timeline a.toml --steps 0", "Invalid value for '--steps'"),
    ("timeline a.toml --model-ms -1", "Invalid value for '--model-ms'"),
    ("timeline a.toml --set loader.batch_sise=4", "batch_size"),
    ("timeline a.toml --epoch 2 --set loader.epochs=2", "has no steps in epoch 2"),
    ("trace a.toml", ONE_OF_THREE),
    ("trace a.toml --index 1 --spike x", ONE_OF_THREE),
    ("trace a.toml --index 1 --exclude x", "--exclude goes with --spike"),
    ("trace a.toml --index 20", "index 20 is out of range: the source has 20 records"),
    ("trace a.toml --index 1 --epochs 3:3", "--epochs 3:3 is empty"),
    ("trace a.toml --key a", "has no keys: give the index of the record"),
    ("trace a.toml --spike none.csv", "--spike: none.csv cannot be read: No such file"),
    ("trace a.toml --spike a.toml --exclude a.syr", "--exclude: a.syr exists: choose another name"),
    ("trace a.toml --index 1 --state a.toml", "--state: a.toml is not JSON"),
    ("trace a.toml --spike header.csv", "the losses need the columns 'step' and 'loss', found ['step', 'value']"),
    (
        "trace a.toml --spike letters.csv",
        "line 2: expected integers as step and epoch, and a number as loss, found {'step': '1', 'loss': 'high'}",
    ),
    ("trace a.toml --spike nan.csv", "line 3: expected integers as step and epoch, and a number as loss, found nan"),
    ("trace a.toml --spike far.csv", "line 2: step 99999999999 is out of range: epoch 100 begins at step 500"),
    ("trace a.toml --spike late.csv", "losses, line 2: epoch 0 has 5 steps, found step 5"),
    ("trace a.toml --spike early.csv", "losses, line 2: epoch 0 has 5 steps, found step -1"),
    ("trace a.toml --spike empty.csv", "the file of losses has no lines"),
    ("certify a.toml", "give --steps and --output to write a certificate, or --check"),
    ("certify a.toml --steps 0:6 --output new.json", "--steps 0:6 is out of range: epoch 0 has 5 steps"),
    ("certify a.toml --steps 0:1 --output a.syr", "--output: a.syr exists: choose another name"),
    ("certify a.toml --steps 0:1 --output none/a", NO_DIRECTORY),
    ("certify a.toml --check a.toml", "this is not a certificate of `dataload certify`"),
    ("certify a.toml --check a.toml --steps 1", "--check takes epoch and steps from the certificate"),
    *((f"bench {arguments}", message) for arguments, message in BENCH),
]


BAD_DATA = [
    ("inspect a.xyz", "for others pass --format, for raw tokens --format tokens"),
    ("order a.toml --set source.path=a.xyz", "pass format="),
    ("verify my_code:broken", "my_code:broken raised OSError: no such disk"),
    ("timeline a.toml --set loader.transform=[operator:neg]", "failed in transform 'neg'"),
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("code", "command", "message"),
    [*((2, *case) for case in WRONG), *((1, *case) for case in BAD_DATA)],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_command_is_a_line_on_stderr_and_writes_nothing(code, command, message):
    before = {*os.listdir()} | {"__pycache__"}
    arguments = shlex.split(command)
    if arguments[0] == "bench":
        arguments += ["--cache", "files"]
    result = fail(code, *arguments)
    assert result.stdout == ""
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert all("deprecated" in line for line in warnings)
    assert result.stderr.splitlines()[len(warnings)].startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == len(warnings) + 1 or code == 1
    assert {*os.listdir()} <= before
