"""Commands that are made once: typer's runner makes all of them from their functions whenever it invokes one, which
takes longer than most of these tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import pytest


@pytest.fixture(scope="session", autouse=True)
def commands_made_once() -> Iterator[None]:
    import typer.testing

    with patch.object(typer.testing, "_get_command", cache(typer.main.get_command)):
        yield
