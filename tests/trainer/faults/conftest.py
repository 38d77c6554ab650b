"""Real runs that something happens to: fixtures of the loop's and the launcher's own tests, and small volumes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.starting import starts_processes
from tests.support.tmpfs import small_tmpfs
from tests.trainer.launch.conftest import start_pod
from tests.trainer.train.volume import Volume

__all__ = ["start_pod"]

HERE = Path(__file__).parent


@pytest.fixture
@starts_processes
def volume(tmp_path: Path) -> Volume:
    """A volume, and trainers that find the tasks of this folder."""
    return Volume(tmp_path, here=HERE)


@pytest.fixture
@starts_processes
def small_volume(tmp_path: Path) -> Iterator[Volume]:
    """The same on a tmpfs of 16 MiB."""
    with small_tmpfs(tmp_path / "shared"):
        yield Volume(tmp_path, here=HERE)
