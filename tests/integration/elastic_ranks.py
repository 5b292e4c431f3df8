"""examples/ddp.py, which notes what it trains on and stops when it should be killed; run by test_torchrun.py.

Arguments: folder for the notes, and those of the example. A job of four or two processes holds after some steps.
"""

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

from torch import distributed

import dataload

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp.py"
HOLD_AFTER = {4: 7, 2: 7}


def load_example():
    spec = importlib.util.spec_from_file_location("ddp_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def main():
    folder = Path(sys.argv.pop(1))
    example = load_example()
    make_source = example.make_source

    def make_numbered():
        source = make_source()
        fields = source.read_batch(range(len(source)))
        return dataload.MemorySource({**fields, "index": range(len(source))})

    class Noted(example.DeviceLoader):
        """A loader that notes its batches."""

        taken = 0

        def __iter__(self):
            rank, world_size = distributed.get_rank(), distributed.get_world_size()
            start = [time.time_ns()]
            distributed.broadcast_object_list(start)
            with open(folder / f"{start[0]}-{rank}.jsonl", "a") as notes:
                for batch in super().__iter__():
                    if self.taken == HOLD_AFTER.get(world_size):
                        sys.stdout.write(f"held: {world_size} processes, {os.getpid()} of {os.getppid()}.\n")
                        sys.stdout.flush()
                        # Some wait to be killed, by the test or by torchrun, and the others for them.
                        if "WAITS" in os.environ and world_size == 4:
                            distributed.barrier()
                        signal.pause()
                    self.taken += 1
                    state = self.state_dict()
                    note = {"world_size": world_size, "after": [state["epoch"], state["position"]]}
                    notes.write(json.dumps({**note, "indices": batch["index"].tolist()}) + "\n")
                    notes.flush()
                    yield batch

    example.make_source, example.DeviceLoader = make_numbered, Noted
    example.main()


if __name__ == "__main__":
    main()
