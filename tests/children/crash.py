"""Runs an example once for each FOLDER or FOLDER:STEPS, and writes the records of its batches to FOLDER.RANK.

After STEPS steps the process dies. Usage: crash.py EXAMPLE FOLDER...
"""

import json
import os
import runpy
import sys

import numpy as np

import dataload


class WatchedLoader(dataload.Loader):
    path, steps = "", 0

    def __iter__(self):
        numbers = {row.tobytes(): i for i, row in enumerate(self.source.read_batch(range(len(self.source)))["x"])}
        for batch in super().__iter__():
            with open(self.path, "a+") as log:
                log.seek(0)
                if len(log.readlines()) == WatchedLoader.steps:
                    os._exit(1)
                log.write(json.dumps([numbers[row.tobytes()] for row in np.asarray(batch["x"])]) + "\n")
            yield batch


def run_example(main, folder, steps):
    os.makedirs(folder, exist_ok=True)
    WatchedLoader.path, WatchedLoader.steps = f"{folder}.{os.environ.get('RANK', 0)}", steps
    sys.argv[1:] = [folder]
    main()
    sys.stdout.flush()
    os._exit(0)


_, example, *runs = sys.argv
dataload.Loader = WatchedLoader
main = runpy.run_path(example)["main"]  # imports the framework once, for all runs
for run in runs:
    folder, _, steps = run.partition(":")
    if (process := os.fork()) == 0:
        run_example(main, folder, int(steps or -1))
    if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != bool(steps):
        sys.exit(f"the run in {run} did not end as expected")
