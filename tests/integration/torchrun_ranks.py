"""What one process of a torchrun job reads; run by test_torchrun.py.

Arguments: folder, batch size, steps of the first epoch, further epochs, state to start from (or nothing).
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed

import dataload
from dataload.torch import distributed_place


def main(folder, batch_size, steps, epochs, state=None):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group("gloo")
    if state is None:
        # As under launchers that tell torch.distributed only.
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
        place = distributed_place()
    else:
        place = {}  # the loader looks into the environment by itself
    pair = distributed.new_group([0, 1])
    try:
        in_pair = distributed_place(pair)
    except dataload.ConfigError as error:
        in_pair = str(error)
    source = dataload.RangeSource(250)
    with dataload.Loader(source, batch_size=batch_size, shuffle=True, seed=5, num_workers=1, **place) as loader:
        if state is not None:
            loader.load_state_dict(json.loads(Path(state).read_text()))
        batches = []
        for epoch in range(1 + epochs):
            for step, batch in enumerate(loader, 1):
                # Would hang if ranks had different numbers of steps.
                distributed.all_reduce(torch.ones(1))
                batches.append(batch["index"][batch["valid"]].tolist())
                if epoch == 0 and step == steps:
                    break
        found = {"batches": batches, "state": loader.state_dict(), "steps": len(loader), "in_pair": in_pair}
    Path(folder, f"{world_size}-{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), *sys.argv[5:])
