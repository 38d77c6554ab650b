"""Volumes, runs of the trainer on them, and a web server to fetch data from.

What imports torch is imported where it is used: with `-n`, a process that runs no test reads this file too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.starting import starts_processes
from tests.trainer.data_server import Web
from tests.trainer.forked import start as forked

if TYPE_CHECKING:
    from tests.trainer.train.volume import Volume


@pytest.fixture
def web() -> Iterator[Web]:
    found = Web()
    yield found
    found.close()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture
@starts_processes
def volume(tmp_path: Path) -> Volume:
    from tests.trainer.train.volume import Volume

    return Volume(tmp_path)


@pytest.fixture
@starts_processes
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Volume:
    """A volume for the scripts that lie beside the test."""
    from tests.trainer.train.volume import Volume

    return Volume(tmp_path / "job", here=request.path.parent)


@pytest.fixture(scope="session")
@starts_processes
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Volume]:
    """Runs that several tests compare with, trained the first time one of them asks."""
    from tests.trainer.train.volume import Volume

    done: dict[Any, Volume] = {}

    def trained(ranks: int, *arguments: str) -> Volume:
        key = (ranks, arguments)
        if key not in done:
            done[key] = Volume(tmp_path_factory.mktemp("reference")).trained(ranks, *arguments)
        return done[key]

    return trained


def pytest_sessionfinish() -> None:
    forked.stop()
