"""Jobs of several processes, of which none is left afterwards, and the packages that they need."""

import importlib.util
import os
import signal
import subprocess

import pytest


def require(*packages):
    """Skip the test if a package is missing. Does not import it, which may take seconds."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'dataload[examples]'")


def run_job(command, *, timeout=80, environment=None):
    job = subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its processes have a group of their own
        env={**os.environ, **(environment or {}), "OMP_NUM_THREADS": "1"},
    )
    try:
        printed, _ = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        printed, _ = job.communicate()
        pytest.fail(f"the job hangs:\n{printed}")
    assert job.returncode == 0, printed
    return printed
