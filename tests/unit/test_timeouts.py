"""A test that hangs is named with its stack, in a worker of pytest-xdist, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
HANGS = """
import time

def test_hangs():
    time.sleep(600)  # the line where it stands
"""


@pytest.mark.processes
def test_a_worker_says_where_a_test_stood_that_took_too_long(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HANGS)
    options = [
        "-n",
        "1",
        "--max-worker-restart=0",
        "--timeout=3",
        "--timeout-method=thread",
        "--rootdir",
        str(tmp_path),
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "tests.support.timeouts", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.returncode == 1
    assert "the line where it stands" in ended.stdout
