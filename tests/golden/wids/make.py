"""Write the files of this folder: python make.py, with webdataset 0.2.100, which has wids."""

import json
import os
import subprocess
import sys

import webdataset
import wids

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    os.chdir(HERE)
    expected = []
    for shard, count in enumerate((3, 0, 4)):
        with webdataset.TarWriter(f"part-{shard}.tar", mtime=0) as writer:
            for number in range(count):
                record = {"__key__": f"{shard}/{number:04d}", "txt": f"text {number}", "cls": number * 10}
                writer.write(record)
                expected.append(record)
    names = [f"part-{shard}.tar" for shard in range(3)]
    widsindex = [sys.executable, "-c", "from wids.wids_index import main; main()"]
    subprocess.run([*widsindex, "create", "-o", "shards.json", *names], check=True)
    assert len(wids.ShardListDataset("shards.json", keep=True)) == len(expected)
    with open("expected.json", "w") as stream:
        json.dump(expected, stream)


main()
