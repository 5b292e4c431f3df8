"""``python -m benchmarks.remote_clients``: a client of an object store in a process of its own, whose CPU counts alone.

It reads its task as JSON from standard input, and writes its figures as JSON, the last line of standard output. Peers
run in their own environment, which needs numpy and this repository on ``PYTHONPATH``. The store and the credentials are
those of the environment.

Keys of a task: ``client``, ``bucket``, ``keys`` of the objects, their size ``nbytes``, ``connections`` and ``cache``, a
directory; the others are options of one client.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import list2cmdline

import numpy as np

from benchmarks.peers.field import Field
from benchmarks.peers.own_formats import write_litdata, write_mds
from dataload.bench.task import used

FIELD = "x"
_CHUNK = 1 << 20  # bytes; the default of obstore, 10 MiB, costs the bare client two to three times the CPU
_BATCH = 64


def record(index, nbytes):
    """The value of a record; random, so that nothing compresses it."""
    return np.frombuffer(np.random.default_rng(index).bytes(nbytes), np.uint8)


def records(shard, count, nbytes):
    return ({FIELD: record(shard * count + row, nbytes)} for row in range(count))


class Records:
    """The records of all shards, made when they are read."""

    def __init__(self, count, nbytes):
        self._count, self._nbytes = count, nbytes

    def __len__(self):
        return self._count

    def read(self, indices):
        return [{FIELD: record(index, self._nbytes)} for index in indices]


def _store(task):
    from obstore.store import S3Store

    return S3Store(task["bucket"], client_options={"allow_http": True})


def get_objects(task):
    """`obstore.get` of whole objects, streamed to files by as many threads as there are connections."""
    import obstore

    store = _store(task)

    def get(key):
        at, file = 0, os.open(os.path.join(task["cache"], os.path.basename(key)), os.O_CREAT | os.O_WRONLY)
        for data in obstore.get(store, key).stream(min_chunk_size=_CHUNK):
            at += os.pwrite(file, data, at)
        os.close(file)
        return at

    def run():
        with ThreadPoolExecutor(task["connections"]) as threads:
            return {"nbytes": sum(threads.map(get, task["keys"]))}

    return run


def get_ranges(task):
    """`obstore.get_range` of records in random order, by as many threads as there are connections."""
    import obstore

    store, nbytes = _store(task), task["record"]
    places = [(key, at) for key in task["keys"] for at in range(0, task["nbytes"] - nbytes, nbytes)]
    order = np.random.default_rng(1).permutation(len(places)).tolist()

    def get(number):
        key, at = places[number]
        return len(obstore.get_range(store, key, start=at, length=nbytes))

    def run():
        with ThreadPoolExecutor(task["connections"]) as threads:
            return {"nbytes": sum(threads.map(get, order))}

    return run


def loader(task):
    """`dataload.Loader`. With ``"only": "download"``, one batch is read, and the shards are downloaded."""
    import obstore.store  # noqa: F401 - which the first open would import

    import dataload.api
    import dataload.loader.loader
    import dataload.sources.syrah.reader
    import dataload.storage.remote.backend

    remote = {"connections": task["connections"], **task.get("remote", {})}
    by_range = _count_rows_by_range()
    if task["cache"]:
        remote["cache"] = task["cache"]

    def run():
        before, begun = used(), time.perf_counter()
        urls = task.get("url") or [f"s3://{task['bucket']}/{key}" for key in task["keys"]]
        with dataload.open(urls, remote=remote) as source:
            opened, usage = time.perf_counter(), used().since(before)
            settings = {"seed": 1, "batch_size": _BATCH, "num_workers": 1, "epochs": 1, **task.get("loader", {})}
            if "pool" in task:
                settings["sampler"] = _pool(source, task["pool"])
            with dataload.Loader(source, **settings) as made:
                found = _read(made, task)
        cpu = usage.user + usage.system
        return {**found, "open_seconds": opened - begun, "open_cpu": cpu, "rows_by_range": sum(by_range)}

    return run


def _count_rows_by_range():
    from dataload.storage.remote.files import RemoteFile

    rows, gather = [], RemoteFile._gather

    def counted(self, out, start, stride, length, indices):
        rows.append(len(indices))
        gather(self, out, start, stride, length, indices)

    RemoteFile._gather = counted
    return rows


def _pool(source, size):
    from dataload.samplers import PoolShuffle, ShardSequential

    return PoolShuffle(ShardSequential(source.shard_lengths, 1), size, 1)


def _read(made, task):
    begun, first, nbytes = time.perf_counter(), None, 0
    batches = iter(made)
    for batch in batches:
        first = first or time.perf_counter() - begun
        nbytes += batch[FIELD].nbytes
        if task.get("only") == "first":
            break
        if task.get("only") == "download":
            nbytes = _wait_for(os.path.join(task["cache"], "shards"), task)
            break
    while task.get("loader", {}).get("epochs", 1) > 1:  # the others
        more = sum(batch[FIELD].nbytes for batch in made)
        if not more:
            break
        nbytes += more
    return {"nbytes": nbytes, "first_seconds": first, "read_seconds": time.perf_counter() - begun}


def _wait_for(directory, task):
    end = time.monotonic() + 120
    while (found := len([name for name in os.listdir(directory) if not name.startswith(".")])) < len(task["keys"]):
        if time.monotonic() > end:
            raise TimeoutError(f"{found} of {len(task['keys'])} shards are in {directory}: is the disk nearly full?")
        time.sleep(0.02)
    return len(task["keys"]) * task["nbytes"]


# Peers, as their documentation sets them up


def mosaicml(task):
    """MosaicML Streaming: MDS shards, `StreamingDataset` with a local cache."""
    import streaming

    streaming.base.util.clean_stale_shared_memory()
    os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]

    def run():
        remote = f"s3://{task['bucket']}/{task['prefix']}"
        data = streaming.StreamingDataset(
            remote=remote, local=task["cache"], shuffle=False, batch_size=_BATCH, download_timeout=300
        )
        return {"nbytes": sum(sample[FIELD].nbytes for sample in data)}

    return run


def litdata(task):
    """LitData: its optimized chunks, `StreamingDataset` with a local cache."""
    from litdata import StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS |= {"allow_http": True}  # no option of its own
    storage = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}

    def run():
        url = f"s3://{task['bucket']}/{task['prefix']}"
        data = StreamingDataset(url, cache_dir=task["cache"], shuffle=False, storage_options=storage)
        return {"nbytes": sum(sample[FIELD].nbytes for sample in data)}

    return run


def webdataset(task):
    """webdataset: tar shards through ``pipe:curl``, as its documentation reads from stores, without a cache."""
    from webdataset import WebDataset

    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    base = f"{os.environ['AWS_ENDPOINT_URL']}/{task['bucket']}"
    sign = ["--aws-sigv4", "aws:amz:us-east-1:s3", "--user", f"{key}:{secret}"]
    urls = ["pipe:" + list2cmdline(["curl", "-s", "-f", *sign, f"{base}/{key}"]) for key in task["keys"]]

    def run():
        return {"nbytes": sum(len(sample[f"{FIELD}.npy"]) for sample in WebDataset(urls, shardshuffle=False))}

    return run


def s3torch(task):
    """s3torchconnector: `S3IterableDataset` of whole objects, without a cache."""
    from s3torchconnector import S3ClientConfig, S3IterableDataset

    config = S3ClientConfig(force_path_style=True)

    def run():
        data = S3IterableDataset.from_objects(
            [f"s3://{task['bucket']}/{key}" for key in task["keys"]],
            region="us-east-1",
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            s3client_config=config,
        )
        return {"nbytes": sum(len(item.read()) for item in data)}

    return run


def s3fs(task):
    """s3fs: `get` of whole objects to files."""
    import s3fs

    store = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])

    def run():
        files = [os.path.join(task["cache"], os.path.basename(key)) for key in task["keys"]]
        store.get([f"{task['bucket']}/{key}" for key in task["keys"]], files)
        return {"nbytes": sum(map(os.path.getsize, files))}

    return run


CLIENTS = {each.__name__: each for each in (get_objects, get_ranges, loader)}
PEERS = {
    "MosaicML Streaming": (mosaicml, write_mds),
    "LitData": (litdata, write_litdata),
    "webdataset, curl": (webdataset, "tar"),
    "s3torchconnector": (s3torch, "syr"),
    "s3fs": (s3fs, "syr"),
}
"""The client of each peer, and the function that writes its format, or the name of a format that it shares."""


def main():
    task = json.load(sys.stdin)
    if "write" in task:
        directory, shards, rows, nbytes = task["write"]
        field = Field(name=FIELD, shape=(nbytes,), shards=shards)
        os.makedirs(directory)
        found = {"path": PEERS[task["client"]][1](Records(shards * rows, nbytes), field, directory)}
    else:
        make = CLIENTS.get(task["client"]) or PEERS[task["client"]][0]
        if task["cache"]:
            Path(task["cache"]).mkdir(parents=True, exist_ok=True)
        run = make(task)
        before, begun = used(), time.perf_counter()
        found = run()
        seconds, usage = time.perf_counter() - begun, used().since(before)
        cpu = usage.user + usage.system - found.get("open_cpu", 0)
        found |= {"seconds": seconds, "cpu": cpu, "system": usage.system}
    print(f"\n{json.dumps(found)}", flush=True)
    os._exit(0)  # some peers leave threads that never end


if __name__ == "__main__":
    main()
