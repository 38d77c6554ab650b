"""From a machine to an installed operator: the cluster, the images on its nodes, the Helm release.

Used by the tests, the demo and the benchmark, so that all of them run what a user would install.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# At once: Helm names itself as the manager of fields after its process, whose name pytest-xdist changes with each test.
import helm_python as helm
from tests.cluster.kube import Kubectl, describe
from tests.kubernetes import Impossible, cluster_running, script
from tests.support.waiting import CLUSTER_SECONDS, eventually

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CHART = ROOT / "charts" / "ddpjob-operator"

NAMESPACE = "ddpjob-system"
RELEASE = "ddpjob-operator"


@dataclass(frozen=True, slots=True)
class Images:
    """References under which every node has the two images."""

    operator: str
    trainer: str


@contextmanager
def cluster_started() -> Iterator[Kubectl]:
    """The cluster, for this process alone; it ends with the block if it was not there before.

    Raises Impossible where none is to be had.
    """
    _alone()
    with cluster_running() as (kubeconfig, _):
        yield Kubectl(kubeconfig)


def load_images() -> Images:
    """Build what changed since the last time, and put it on every node.

    A cluster that cluster.sh did not start pulls its images itself: there the variables DDPJOB_TEST_OPERATOR_IMAGE and
    DDPJOB_TEST_TRAINER_IMAGE name them. Raises Impossible where they do not.
    """
    if script("cluster.sh", "choose").strip() == "given":
        named = [os.environ.get(f"DDPJOB_TEST_{what}_IMAGE", "") for what in ("OPERATOR", "TRAINER")]
        if not all(named):
            raise Impossible(
                "DDPJOB_TEST_KUBECONFIG names a cluster that images cannot be loaded into from here: push them to a "
                "registry that it pulls from, and name them in DDPJOB_TEST_OPERATOR_IMAGE and DDPJOB_TEST_TRAINER_IMAGE"
            )
        return Images(*named)
    built = [line.split() for line in script("images.sh", "operator", "trainer").splitlines()]
    for reference, archive in built:
        script("cluster.sh", "load", archive, reference)
    return Images(*(reference for reference, _ in built))


@contextmanager
def node_lost(name: str, *, power: bool) -> Iterator[float]:
    """A node of a cluster that cluster.sh started falls silent; its containers die with it (`power`) or run on.

    At the end of the block it is there again. Yields the moment of its death, in seconds since the epoch. Raises
    Impossible where the cluster's nodes are not ours to kill.
    """
    number = name.rpartition("-")[2]
    died = time.time()
    try:
        script("cluster.sh", "lose", number, *(["--power"] if power else []))
        yield died
    finally:
        script("cluster.sh", "up")


@contextmanager
def operator_installed(kubectl: Kubectl, images: Images, *, chart: Path = CHART, **values: Any) -> Iterator[Kubectl]:
    """The chart, installed by Helm until the end of the block; kubectl within its namespace.

    `values` are merged over the images. What a run that was killed left behind is replaced.
    """
    with helm.Config(kubeconfig_path=kubectl.kubeconfig, namespace=NAMESPACE) as config:
        config.uninstall(RELEASE, ignore_not_found=True, wait="watcher", timeout=300)
        system = kubectl.within(NAMESPACE)
        # Helm waits for the Deployment; its pods end later, and still ask for what their role no longer allows
        eventually(lambda: system.list("pods", f"app.kubernetes.io/instance={RELEASE}") == [], "no operator is left")
        try:
            config.install(
                chart, RELEASE, chart_values(images) | values, create_namespace=True, wait="watcher", timeout=300
            )
        except helm.HelmError as error:
            # Helm says that a Deployment is not ready, never why
            raise RuntimeError(f"{error}\n{describe(system)}") from error
        try:
            yield system
        finally:
            config.uninstall(RELEASE, wait="watcher", timeout=300)


def chart_values(images: Images) -> dict[str, Any]:
    """Values of the chart that make it use images which are already on the nodes."""
    repository, _, tag = images.operator.rpartition(":")
    return {
        "image": {"registry": "", "repository": repository, "tag": tag},
        "trainer": {"image": images.trainer},
    }


def operator_pod(kubectl: Kubectl) -> str | None:
    """Name of the operator's ready pod; None while there is none."""
    for pod in kubectl.within(NAMESPACE).list("pods", f"app.kubernetes.io/instance={RELEASE}"):
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
        if ready and "deletionTimestamp" not in pod["metadata"]:
            return str(pod["metadata"]["name"])
    return None


def wait_operator(kubectl: Kubectl) -> str:
    """Name of the operator's pod once it is ready."""
    system = kubectl.within(NAMESPACE)
    return eventually(
        lambda: operator_pod(kubectl),
        "the operator's pod is ready",
        CLUSTER_SECONDS,
        lambda: system.run("describe", "pods", check=False).stdout + system.logs(f"deployment/{RELEASE}"),
    )


@cache
def _alone() -> int:
    """Wait for the test session, demo or benchmark that is at work on this machine.

    Images and operator serve a whole cluster, and would be exchanged under its feet. The lock ends with this process,
    however that ends.
    """
    lock = os.open(Path(tempfile.gettempdir(), "ddpjob-cluster-tests.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting for another test run that uses the test cluster", file=sys.stderr, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock
