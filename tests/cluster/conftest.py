"""The cluster, the images and the operator once a session; a recorded namespace for each test that runs a job."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.cluster.history import History
from tests.cluster.installation import (
    Images,
    cluster_started,
    load_images,
    operator_installed,
    wait_operator,
)
from tests.cluster.kube import Kubectl, Object, describe
from tests.cluster.scenario import Records, Scenario
from tests.kubernetes import Impossible
from tests.support.tiers import cannot_run

HERE = Path(__file__).parent

COLD_SECONDS = 2400
"""Building Kubernetes and both images is part of whichever test comes first; every wait has a deadline of its own."""

PART_OF, TESTS = "app.kubernetes.io/part-of", "ddpjob-tests"

FIRST = "test_training.py"
"""Looks at the pods of a finished job, which are evicted if a node that a later test takes down is away for long."""

LAST = "test_permissions.py"
"""Looks back at all that the operator did for the tests before it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(COLD_SECONDS), append=False)  # before a timeout of its own
    items.sort(key=lambda item: (item.path != HERE / FIRST, item.path == HERE / LAST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what there was to see in its namespace."""
    report = yield
    scenario = getattr(item, "funcargs", {}).get("scenario")
    if report.when == "call" and report.failed and isinstance(scenario, Scenario):
        report.sections.append(("what there was to see", describe(scenario.kubectl)))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[Kubectl]:
    """kubectl against the test cluster, which ends with the session if it was not there before."""
    with ExitStack() as session:
        try:
            kubectl = session.enter_context(cluster_started())
        except Impossible as missing:
            cannot_run("cluster", str(missing))
        # a session that was killed left its namespaces, and their jobs still train
        kubectl.run("delete", "namespaces", "--selector", f"{PART_OF}={TESTS}", "--wait=false")
        yield kubectl


@pytest.fixture(scope="session")
def images(cluster: Kubectl) -> Images:
    """Both images of this working tree, on every node."""
    try:
        return load_images()
    except Impossible as missing:
        cannot_run("cluster", str(missing))


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


@pytest.fixture(scope="session")
def operator(cluster: Kubectl, images: Images) -> Iterator[Operator]:
    """The chart, installed by Helm for the whole session."""
    with operator_installed(cluster, images) as kubectl:
        pod = kubectl.get("pod", wait_operator(kubectl))
        assert pod is not None
        created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
        yield Operator(kubectl, created, pod["spec"]["serviceAccountName"])


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
def unbroken(operator: Operator, images: Images, new_namespace: Callable[[str], Kubectl]) -> Iterator[Unbroken]:
    """The run that every broken one must equal."""
    with recorded(new_namespace("unbroken"), images) as scenario:
        began = datetime.now(UTC)
        scenario.apply()
        scenario.wait_phase("Succeeded")
        ended = datetime.now(UTC)
        yield Unbroken(scenario, scenario.job, scenario.pods(0), scenario.records(), began, ended)
