"""Certificates that version 0.1 would have written, from what it served: this release serves the same batches."""

from pathlib import Path

import pytest
from command_line import run

CONFIGS = sorted(Path(__file__).parent.glob("certificates/*.toml"))


@pytest.mark.parametrize("config", CONFIGS, ids=[config.stem for config in CONFIGS])
def test_batches_are_those_of_the_last_release(config):
    result = run("certify", config, "--check", config.with_suffix(".json"))
    assert result.exit_code == 0, result.output
    assert "the same batches, bit for bit" in result.output
    assert "certified by dataload 0.1" in result.output
