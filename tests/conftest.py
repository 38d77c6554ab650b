"""What holds for every tier: a property is tested for what it says, never for how fast this machine says it; and two
tiers may run side by side.
"""

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("any-machine")

HERE = Path(__file__).parent
ON_KUBERNETES = ("cluster", "api_server")
TOGETHER = (*ON_KUBERNETES, "local", "trainer/loop")
"""Folders whose tests share a cluster, an API server or a run that others compare with, the longest first."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tell the workers of pytest-xdist what must not be torn apart, and what to begin with."""
    if not hasattr(config, "workerinput"):
        return
    one_cluster = _one_cluster()
    for item in items:
        folder = _folder(item)
        group = "Kubernetes" if one_cluster and folder in ON_KUBERNETES else folder
        item.add_marker(pytest.mark.xdist_group(group or item.path.relative_to(HERE).as_posix()))
    items.sort(key=_turn)
    if one_cluster:
        items.sort(key=lambda item: _folder(item) != "api_server")


def _one_cluster() -> bool:
    """Is there one for both tiers? Then the API's tests come first: the operator of the others would serve them too."""
    choice = subprocess.run([HERE / "cluster" / "cluster.sh", "choose"], capture_output=True, text=True)
    return choice.stdout.strip() in ("given", "kind")


def _folder(item: pytest.Item) -> str | None:
    return next((folder for folder in TOGETHER if item.path.is_relative_to(HERE / folder)), None)


def _turn(item: pytest.Item) -> int:
    """The decisions' own tests, which take seconds, are left for the end, where they fill the gaps."""
    folder = _folder(item)
    return TOGETHER.index(folder) if folder else len(TOGETHER) + item.path.is_relative_to(HERE / "unit")
