"""A test that hangs is named with its stack, in a worker of pytest-xdist, too, which writes nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
HANGS = """
import time

def test_hangs():
    time.sleep(600)  # the line where it stands
"""


def in_a_worker(tmp_path: Path, test: str) -> tuple[int, str]:
    """Exit code and output of pytest, for a file with this text."""
    (tmp_path / "test_it.py").write_text(test)
    options = ["-n1", "--max-worker-restart=0", "--timeout=3", "--timeout-method=thread", f"--rootdir={tmp_path}"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "tests.support.timeouts", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    return ended.returncode, ended.stdout


def test_a_worker_says_where_a_test_stood_that_took_too_long(tmp_path: Path) -> None:
    code, output = in_a_worker(tmp_path, HANGS)
    assert (code, output.count("the line where it stands")) == (1, 1), output


def test_a_worker_has_no_summary_of_its_own(tmp_path: Path) -> None:
    code, output = in_a_worker(tmp_path, "def test_fails(): assert 1 == 2\n")
    assert (code, output.count("1 failed in"), output.count("= FAILURES =")) == (1, 1, 1), output
