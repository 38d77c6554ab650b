"""Programs that are not installed with this project."""

from __future__ import annotations

import pytest
from tests.support.tiers import program


@pytest.fixture(scope="session")
def promtool() -> str:
    return program("prometheus", "promtool")
