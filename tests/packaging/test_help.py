"""`--help` of everything that is started by `python -m` answers, without an environment, and is no error."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAMS = (
    "ddpjob_operator.main",
    "ddp_trainer.doctor",
    "ddp_trainer.initialize",
    "ddp_trainer.launch",
    "ddp_trainer.logs",
    "ddp_trainer.snapshots",
    "ddp_trainer.train",
)


@pytest.mark.parametrize("module", PROGRAMS)
def test_help_prints_the_usage_and_succeeds(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, env={})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
    assert module in done.stdout
