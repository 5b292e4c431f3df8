"""A rank of a job, whose config is the argument: takes a batch for each line that it reads, and answers with one."""

import json
import sys

import dataload


def main() -> None:
    config = json.loads(sys.argv[1])
    source = config["source"]
    with dataload.open(source["path"], storage_options=source["storage"], remote={"mode": "ranges"}) as other:
        other[0]  # what the first request takes longer is not the line's time
    with dataload.from_config(config) as loader:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        batches = iter(loader)
        for _ in sys.stdin:
            next(batches)
            sys.stdout.write("done\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
