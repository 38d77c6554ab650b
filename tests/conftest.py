"""What holds for every tier: a property is tested for what it says, never for how fast this machine says it; and two
tiers may run side by side.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from tests.cluster.turns import BESIDE
from tests.support import timeouts
from tests.support.durations import Durations
from tests.support.examples import QUICK
from tests.support.leftovers import end, leftovers, name_this_run
from tests.support.starting import NoProcess
from tests.support.tiers import required_tiers
from tests.trainer.forked import start as forked

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile(QUICK, settings.get_profile("any-machine"), max_examples=25)
settings.load_profile("any-machine")

HERE = Path(__file__).parent
ON_KUBERNETES = ("cluster", "api_server")
TOGETHER = (*ON_KUBERNETES, "local", "trainer/train")
"""Folders whose tests share a cluster, an API server or a run that others compare with, the longest first."""
BESIDE_CLUSTER = "beside cluster"
"""The files of the first of them that a second worker has, at the same time."""
IN_PROCESS = ("trainer", "unit")
"""Folders whose tests start no process without the mark that says so."""
DURATIONS = pytest.StashKey[Durations]()


def pytest_configure(config: pytest.Config) -> None:
    """A wrong DDPJOB_REQUIRE is said before any test, and not by the tests that happen to skip."""
    required_tiers()
    gc.disable()  # until all tests are imported, and torch with them
    # of API servers, kubectl and promtool, which Go's collector takes a sixth of the time of; there is memory enough
    os.environ.setdefault("GOGC", "400")
    name_this_run()
    # in the background of a script it is ignored, and so it would be by every command that a test sends Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not any("tests/gpu" in argument for argument in config.args):
        # everywhere else several ranks share this machine, which has fewer GPUs than they are
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config.stash[DURATIONS] = durations = Durations()
    config.pluginmanager.register(durations)
    config.pluginmanager.register(timeouts)
    config.pluginmanager.register(NoProcess(*(HERE / folder for folder in IN_PROCESS)))


def pytest_collection_finish() -> None:
    """Modules and test items stay to the end: the collector need not go through them again and again, which took most
    of the time of tests that make many objects.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """After the last fixture, and the last worker, has ended: nothing that this run started is left."""
    yield
    if hasattr(session.config, "workerinput"):
        return
    forked.clear()
    if left := leftovers():
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.section("still running: what a test starts ends with it", red=True)
        reporter.write("\n".join(left) + "\n")
        end(left)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash[DURATIONS].lines():
        terminalreporter.section("durations of the tiers")
        terminalreporter.write("\n".join(lines) + "\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """With `-n`, a worker gets what must not be torn apart: one of those folders, or a file."""
    from xdist.scheduler import LoadScopeScheduling

    class Tiers(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return Tiers(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Side by side, the longest come first; the decisions' own tests, which take seconds, fill the gaps at the end."""
    if not hasattr(config, "workerinput"):
        return
    needed = any(item.path.is_relative_to(HERE / folder) for item in items for folder in ON_KUBERNETES)
    first = ("api_server", "cluster") if needed and _one_cluster() else ON_KUBERNETES
    turns = {scope: turn for turn, scope in enumerate((*first, *TOGETHER[2:]))}
    turns[BESIDE_CLUSTER] = turns["cluster"]

    def turn(item: pytest.Item) -> int:
        path = item.path.relative_to(HERE)
        return turns.get(_together(path) or "", len(turns) + path.is_relative_to("unit"))

    items.sort(key=turn)


@cache  # asked twice for each test, and the same for all of a file
def _scope(file: str) -> str:
    path = PurePosixPath(file).relative_to("tests")
    scope = _together(path)
    return "Kubernetes" if scope in (*ON_KUBERNETES, BESIDE_CLUSTER) and _one_cluster() else scope or str(path)


@cache
def _one_cluster() -> bool:
    """Is there one for both tiers? Then the API's tests come first: the operator of the others would serve them too."""
    choice = subprocess.run([HERE / "cluster" / "cluster.sh", "choose"], capture_output=True, text=True)
    return choice.stdout.strip() in ("given", "kind")


def _together(path: Path | PurePosixPath) -> str | None:
    """What the file must not be torn from."""
    folder = next((folder for folder in TOGETHER if path.is_relative_to(folder)), None)
    return BESIDE_CLUSTER if folder == "cluster" and path.name in BESIDE else folder
