"""Syrah with too few descriptors."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from dataload.sources.syrah.writer import SyrahWriter

pytestmark = pytest.mark.slow


@pytest.mark.slow_suite
def test_more_shards_than_descriptors(tmp_path):
    """100 shards, 40 descriptors, four threads."""
    for shard in range(100):
        with SyrahWriter(tmp_path / f"{shard:03d}.syr") as writer:
            writer.extend({"x": np.array([shard * 2 + row])} for row in range(2))
    program = textwrap.dedent(f"""
        import glob, os, resource
        from concurrent.futures import ThreadPoolExecutor
        import numpy as np
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        from dataload.sources.syrah.reader import SyrahSource
        source = SyrahSource(sorted(glob.glob({str(tmp_path)!r} + "/*.syr")), map=False)
        assert len(source) == 200
        assert [int(record["x"][0]) for record in source] == list(range(200))
        assert source.read_batch(range(200))["x"][:, 0].tolist() == list(range(200))
        def work(seed):
            indices = np.random.default_rng(seed).integers(0, 200, 300)
            return source.read_batch(indices)["x"][:, 0].tolist() == indices.tolist()
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(8)))
        assert len(os.listdir("/proc/self/fd")) < 40
        assert len(source.fingerprint()) == 32
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
