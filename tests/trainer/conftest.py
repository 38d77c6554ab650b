"""A volume, and a web server to fetch data from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainer.data_server import Web


@pytest.fixture
def web() -> Iterator[Web]:
    found = Web()
    yield found
    found.close()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"
