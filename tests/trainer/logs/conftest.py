"""A volume that is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.starting import starts_processes
from tests.support.tmpfs import small_tmpfs


@pytest.fixture
@starts_processes
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder on a tmpfs of one page, so that the second line is more than it holds."""
    with small_tmpfs(tmp_path / "small", "64k") as folder:
        yield folder


def fill(folder: Path) -> Path:
    """Leave no byte free; the file that takes them."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast
