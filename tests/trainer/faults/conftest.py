"""Real runs that something happens to: fixtures of the loop's and the launcher's own tests, and small volumes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainer.launch.conftest import start_pod
from tests.trainer.train.volume import Volume

__all__ = ["start_pod"]

HERE = Path(__file__).parent


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    """A volume, and trainers that find the tasks of this folder."""
    return Volume(tmp_path, here=HERE)


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Volume]:
    """The same on a tmpfs of 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    shared = tmp_path / "shared"
    shared.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "ddpjob-test", str(shared)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        yield Volume(tmp_path, here=HERE)
    finally:
        subprocess.run(["umount", "-l", str(shared)], check=True)
