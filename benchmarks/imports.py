"""CPU time of new interpreters: of `import dataload`, of the first loader, and of ``dataload --help``."""

import subprocess
import sys
from statistics import median

from benchmarks.harness import aim, show
from dataload.bench.task import used

ROUNDS = 11
PROGRAMS = {
    "python": ["-c", "pass"],
    "numpy": ["-c", "import numpy"],
    "import dataload": ["-c", "import dataload"],
    "dataload.Loader": ["-c", "import dataload; dataload.Loader"],
    "dataload.open": ["-c", "import dataload; dataload.open"],
    "dataload --help": ["-m", "dataload", "--help"],
}


def imports():
    """Programs in interleaved rounds, with warm bytecode; what the machine does besides hardly counts as CPU time."""
    seconds = {name: [] for name in PROGRAMS}
    for number in range(ROUNDS + 1):
        for name, arguments in PROGRAMS.items():
            took = _cpu_seconds(arguments)
            if number:  # the first round compiles
                seconds[name].append(took)
    rows = []
    for name, values in seconds.items():
        over = {f"over {base}": median(values) - median(seconds[base]) for base in ("python", "numpy")}
        rows.append({"case": name, "seconds": median(values), **over})
    shown = show("import", "CPU seconds of a new interpreter, medians", rows)
    print()
    return [
        *shown,
        aim("import", "import dataload, seconds over python", shown[2]["over python"], most=0.02),
        aim("import", "dataload --help, seconds", shown[-1]["seconds"], most=0.25),
    ]


def _cpu_seconds(arguments):
    before = used()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return sum(used().since(before)[:2])
