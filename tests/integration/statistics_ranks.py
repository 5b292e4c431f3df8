"""What each process of a job gets of `dataload.torch.statistics`; run by test_ranks.py.

Arguments: folder. The last rank reads slowly, or, in a second call, has ended.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch import distributed

import dataload
from dataload.torch import distributed_place, statistics


def slow(record):
    time.sleep(0.005)
    return record


def main(folder):
    distributed.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank, last = distributed.get_rank(), distributed.get_world_size() - 1
    group = distributed.new_group([0, last])
    settings = {"transform": slow} if rank == last else {}
    with dataload.Loader(dataload.RangeSource(400), batch_size=10, **settings, **distributed_place()) as loader:
        before = None
        for step, _ in enumerate(loader, 1):
            before = loader.statistics() if step == 4 else before
            if step == 8:
                break
        table, recent = statistics(loader), statistics(loader, since=before)
        pair = statistics(loader, group=group) if rank in (0, last) else None
        found = [each and (sorted(each.ranks), each.slowest, each.verdict) for each in (table, recent, pair)]
        found.append(recent and recent.ranks[last].steps)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        distributed.barrier()
        if rank == last:
            os._exit(0)
        try:
            statistics(loader)
        except dataload.DataloadError as error:
            Path(folder, f"{rank}.txt").write_text(str(error))
    os._exit(0)  # torch waits for the process that has ended


if __name__ == "__main__":
    main(sys.argv[1])
