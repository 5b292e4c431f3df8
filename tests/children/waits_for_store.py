"""Does what the first argument says with the shards at the second, a URL; says so on stdout when Ctrl-C may come."""

import os
import signal
import sys

import dataload
from dataload.convert import convert

SHARDS = "part-{0,1,2,3}.syr"


def main() -> None:
    what, url, cache = sys.argv[1:]
    shards = f"{url}/{SHARDS}"
    modes = {"ranges": {"mode": "ranges"}, "shards": {"cache": cache, "mode": "shards"}}

    def opened(mode="ranges", **options):
        return dataload.open(shards, remote={"timeout": 120, "part_bytes": 30_000, **modes[mode], **options})

    def epoch(mode="ranges", **settings):
        with opened(mode) as source, dataload.Loader(source, batch_size=8, shuffle=True, seed=1, **settings) as loader:
            ready()
            for _ in loader:
                pass

    actions = {
        "open": lambda: (ready(), opened()),
        "one record": lambda: read(opened(), lambda source: source[0]),
        "a large record": lambda: read(opened(part_bytes=1000), lambda source: source[0]),
        "a batch": lambda: read(opened(), lambda source: source.read_batch([*range(0, 32, 3)])),
        "a shard": lambda: read(opened("shards"), lambda source: source[0]),
        "no workers": lambda: epoch(num_workers=0),
        "threads": lambda: epoch(num_workers=2),
        "threads, shards": lambda: epoch("shards", num_workers=2),
        "no workers, shards": lambda: epoch("shards", num_workers=0),
        "processes": lambda: epoch(num_workers=2, executor="processes"),
        "caught": lambda: caught(opened()),
        "convert from": lambda: read(opened(), lambda source: convert(source, f"{cache}/out.syr")),
        "convert to": lambda: read(
            dataload.open(f"{os.environ['TEST_SHARDS']}/{SHARDS}"),
            lambda source: convert(source, "s3://bucket/out-{00..01}.syr"),
        ),
    }
    actions[what]()


def ready() -> None:
    """Say that reading begins, and let it stall."""
    os.write(1, b"ready\n")
    sys.stdin.readline()


def read(source, call) -> None:
    ready()
    call(source)


def caught(source) -> None:
    """End by itself after Ctrl-C, with a loader that was not closed."""
    loader = dataload.Loader(source, batch_size=8, num_workers=2)
    ready()
    try:
        next(iter(loader))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.write(1, b"caught\n")
        raise


if __name__ == "__main__":
    main()
