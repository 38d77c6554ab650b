"""The cluster, the images and the operator once a run; a recorded namespace for each test that runs a job.

Two workers may share them (`turns`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.history import History
from tests.cluster.installation import (
    NAMESPACE,
    Images,
    cluster_started,
    load_images,
    operator_installed,
    wait_operator,
)
from tests.cluster.kube import Kubectl, Object, describe
from tests.cluster.scenario import Records, Scenario
from tests.cluster.turns import ALONE, BESIDE, LAST, place
from tests.kubernetes import Impossible
from tests.support.one_for_all import Turns, one_for_all
from tests.support.tiers import cannot_run
from tests.trainer.forked import start as forked

HERE = Path(__file__).parent

COLD_SECONDS = 2400
"""Building Kubernetes and both images is part of whichever test comes first; every wait has a deadline of its own."""

PART_OF, TESTS = "app.kubernetes.io/part-of", "ddpjob-tests"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(COLD_SECONDS), append=False)  # before a timeout of its own
    items.sort(key=lambda item: place(item.path.name) if item.path.parent == HERE else place(""))


def pytest_sessionfinish() -> None:
    forked.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what there was to see in its namespace."""
    report = yield
    scenario = getattr(item, "funcargs", {}).get("scenario")
    if report.when == "call" and report.failed and isinstance(scenario, Scenario):
        report.sections.append(("what there was to see", describe(scenario.kubectl)))
    return report


@dataclass(frozen=True, slots=True)
class Operator:
    """The installed operator: kubectl within its namespace, and since when it is there."""

    kubectl: Kubectl
    since: datetime
    account: str

    @property
    def user(self) -> str:
        """What the API server calls it."""
        return f"system:serviceaccount:{self.kubectl.namespace}:{self.account}"


@dataclass(frozen=True, slots=True)
class Site:
    """All that the workers of a run have in common."""

    cluster: Kubectl
    images: Images
    operator: Operator


@pytest.fixture(scope="session")
def of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run have."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def site(of_run: Path) -> Iterator[Site]:
    """The test cluster, with both images of this working tree and the operator, which ends with the run if it was not
    there before.
    """
    with ExitStack() as run:
        try:
            found = run.enter_context(one_for_all(of_run, "cluster", _started))
        except Impossible as missing:
            cannot_run("cluster", str(missing))
        kubectl = Kubectl(Path(found["kubeconfig"]))
        operator = Operator(kubectl.within(NAMESPACE), datetime.fromisoformat(found["since"]), found["account"])
        yield Site(kubectl, Images(**found["images"]), operator)


@contextmanager
def _started() -> Iterator[dict[str, Any]]:
    with cluster_started() as kubectl:
        # a session that was killed left its namespaces, and their jobs still train
        kubectl.run("delete", "namespaces", "--selector", f"{PART_OF}={TESTS}", "--wait=false")
        images = load_images()
        with operator_installed(kubectl, images) as installed:
            pod = installed.get("pod", wait_operator(installed))
            assert pod is not None
            yield {
                "kubeconfig": os.fspath(kubectl.kubeconfig),
                "images": asdict(images),
                "since": pod["metadata"]["creationTimestamp"],
                "account": pod["spec"]["serviceAccountName"],
            }


@pytest.fixture(scope="session")
def cluster(site: Site) -> Kubectl:
    """kubectl against the test cluster."""
    return site.cluster


@pytest.fixture(scope="session")
def images(site: Site) -> Images:
    """Both images of this working tree, on every node."""
    return site.images


@pytest.fixture(scope="session")
def operator(site: Site) -> Operator:
    """The chart, installed by Helm for the whole run."""
    return site.operator


@pytest.fixture(scope="session")
def turns(of_run: Path) -> Turns:
    """On the cluster."""
    return Turns(of_run / "cluster.turn")


@pytest.fixture(scope="session")
def alone(site: Site, turns: Turns) -> Iterator[None]:
    """From now on no other worker has a test on the cluster."""
    with turns.alone():
        yield


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest, turns: Turns) -> Iterator[None]:
    """That of a test on the cluster."""
    name = request.path.name
    with ExitStack() as stack:
        if "site" in request.fixturenames:
            if name in BESIDE:
                stack.enter_context(turns.beside_others())
            elif name in ALONE or name == LAST:
                request.getfixturevalue("alone")
        yield


@pytest.fixture(scope="session")
def new_namespace(cluster: Kubectl) -> Callable[[str], Kubectl]:
    """Makes a namespace of a fresh name that enforces the restricted Pod Security profile, from Kubernetes 1.25 on."""

    def create(purpose: str) -> Kubectl:
        name = f"ddpjob-{purpose}-{secrets.token_hex(3)}"
        labels = {"pod-security.kubernetes.io/enforce": "restricted", PART_OF: TESTS}
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        return cluster.within(name)

    return create


@contextmanager
def recorded(kubectl: Kubectl, images: Images) -> Iterator[Scenario]:
    """A scenario in an empty namespace, which is deleted afterwards."""
    try:
        with History(kubectl) as history:
            yield Scenario(kubectl, history, images.trainer)
            assert history.differences() == [], "the record is not what etcd has"
    finally:
        kubectl.delete("namespace", kubectl.namespace)


@pytest.fixture
def scenario(
    request: pytest.FixtureRequest, operator: Operator, images: Images, new_namespace: Callable[[str], Kubectl]
) -> Iterator[Scenario]:
    """A namespace of this test's own with no job in it yet, and the operator at work."""
    purpose = request.path.stem.removeprefix("test_").replace("_", "-")
    with recorded(new_namespace(purpose), images) as scenario:
        yield scenario


@dataclass(frozen=True, slots=True)
class Unbroken:
    """A job that nobody disturbed, after its end. Its namespace is still there."""

    scenario: Scenario
    job: Object
    pods: list[Object]
    records: Records
    began: datetime
    ended: datetime


@pytest.fixture(scope="session")
def unbroken(
    operator: Operator, images: Images, new_namespace: Callable[[str], Kubectl], turns: Turns
) -> Iterator[Unbroken]:
    """The run that every broken one must equal. Its pods have the nodes for themselves, or they might share one."""
    with recorded(new_namespace("unbroken"), images) as scenario:
        with turns.alone():
            began = datetime.now(UTC)
            scenario.apply()
            scenario.wait_phase("Succeeded")
            ended = datetime.now(UTC)
        yield Unbroken(scenario, scenario.job, scenario.pods(0), scenario.records(), began, ended)
