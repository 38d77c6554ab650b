"""Upgrades the operator from an earlier version under jobs in different phases, which is to change nothing for them.

    python -m tests.cluster.upgrade REF

Chart and images of REF (a commit, a tag or a branch) are installed on the test cluster, then those of the working tree.
Running jobs keep their pods, attempt and counters and train on. Then a rank of each is killed: the new operator and the
new trainer go on from the snapshots of the old ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python as helm
from rich.console import Console
from tests.cluster.history import History
from tests.cluster.installation import (
    CHART,
    NAMESPACE,
    RELEASE,
    ROOT,
    Images,
    chart_values,
    cluster_started,
    load_images,
    operator_installed,
    wait_operator,
)
from tests.cluster.kube import Kubectl, describe
from tests.cluster.scenario import Scenario
from tests.kubernetes import script
from tests.support.waiting import eventually

TENANT = "ddpjob-upgrade"
LONG = {"args": ["--task=digits", "--epochs=100000"], "restart": {"backoff": {"initialSeconds": 0}}}
RUNNING: dict[str, dict[str, Any]] = {
    "gang": LONG,
    "in-place": LONG | {"restart": {"backoff": {"initialSeconds": 0}, "scope": "InPlace"}},
    "elastic": LONG | {"elastic": {"minNodes": 1}},
}
SUSPENDED, FINISHED = "suspended", "finished"


@dataclass(frozen=True)
class Seen:
    """What an upgrade must leave as it is."""

    pods: tuple[tuple[str, str], ...]
    """Name and uid of each."""
    attempt: int
    restarts: int
    disruptions: int


def seen(job: Scenario) -> Seen:
    status = job.status
    pods = sorted((pod["metadata"]["name"], pod["metadata"]["uid"]) for pod in job.pods(status["attempt"]))
    return Seen(tuple(pods), status["attempt"], status.get("restarts", 0), status.get("disruptions", 0))


@contextmanager
def checkout(ref: str) -> Iterator[Path]:
    """The project at `ref`, in a folder of its own, with a version that is not the working tree's: images have it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "earlier")
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", place, ref], check=True)
        try:
            project = place / "pyproject.toml"
            project.write_text(re.sub(r'^version = ".*"$', 'version = "0.0.1"', project.read_text(), flags=re.M))
            yield place
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", place], check=True)


def images_of(place: Path) -> Images:
    """Those that the checkout builds, on every node."""
    built = subprocess.run(
        [place / "tests/cluster/images.sh", "operator", "trainer"], check=True, stdout=subprocess.PIPE, text=True
    )
    lines = [line.split() for line in built.stdout.splitlines()]
    for reference, archive in lines:
        script("cluster.sh", "load", archive, reference)
    return Images(*(reference for reference, _ in lines))


VALUES = """
import json, sys
from tests.cluster.installation import Images, chart_values
print(json.dumps(chart_values(Images(*sys.argv[1:]))))
"""


def values_of(place: Path, images: Images) -> dict[str, Any]:
    """The values of the checkout's chart that make it use its images: the names of values may have changed."""
    path = os.pathsep.join(str(place / folder) for folder in ("", "operator", "trainer_image"))
    printed = subprocess.check_output(
        [sys.executable, "-c", VALUES, images.operator, images.trainer],
        cwd=place,
        env=os.environ | {"PYTHONPATH": path},
    )
    found: dict[str, Any] = json.loads(printed)
    return found


def begin(jobs: dict[str, Scenario]) -> None:
    """Jobs that train, one that was suspended in its middle, and one that is over."""
    for name, spec in RUNNING.items():
        jobs[name].apply(**spec)
    jobs[SUSPENDED].apply(**LONG)
    jobs[FINISHED].apply(args=["--task=digits", "--epochs=2"])
    for name in RUNNING:
        jobs[name].wait_trained(40)
    jobs[SUSPENDED].wait_trained(40)
    jobs[SUSPENDED].apply(**LONG, suspend=True)
    jobs[SUSPENDED].wait_phase("Suspended")
    jobs[SUSPENDED].history.wait(lambda: not jobs[SUSPENDED].pods(0), "the pods of the suspended job are gone")
    jobs[FINISHED].wait_phase("Succeeded")


def step_of(job: Scenario) -> int:
    """In the job's status, which the operator writes."""
    return int((job.status.get("progress") or {}).get("step") or 0)


def upgrade(kubectl: Kubectl, images: Images) -> str:
    """To the chart and the images of the working tree; the name of the new operator's pod."""
    with helm.Config(kubeconfig_path=kubectl.kubeconfig, namespace=NAMESPACE) as config:
        config.upgrade(CHART, RELEASE, chart_values(images), wait="watcher", timeout=300)
    return wait_operator(kubectl)


def check(jobs: dict[str, Scenario], before: dict[str, Seen], over: dict[str, Any]) -> Iterator[str]:
    """What differs from what there was before the upgrade."""
    for name in (*RUNNING, SUSPENDED):
        if (now := seen(jobs[name])) != before[name]:
            yield f"{name}: {before[name]} became {now}"
    if (now_over := _end_of(jobs[FINISHED])) != over:
        yield f"{FINISHED}: {over} became {now_over}"


def _end_of(job: Scenario) -> dict[str, Any]:
    """What a job that is over leaves, whatever else a version keeps in the status."""
    fields = ("phase", "startTime", "completionTime", "attempt", "restarts", "progress", "snapshot")
    return {field: job.status.get(field) for field in fields}


def go_on(jobs: dict[str, Scenario], before: dict[str, Seen]) -> Iterator[str]:
    """A rank of each job is killed, and the suspended job goes on: from a snapshot, and counted once."""
    steps = {name: step_of(jobs[name]) for name in (*RUNNING, SUSPENDED)}
    for name in RUNNING:
        jobs[name].kill_rank(1, attempt=before[name].attempt)
    jobs[SUSPENDED].apply(**LONG, suspend=False)
    for name, step in steps.items():
        report = jobs[name].wait_trained(step + 1, attempt=before[name].attempt + 1)
        if not report["resumedFromStep"]:
            yield f"{name}: training began anew"
        counted = jobs[name].status.get("restarts", 0) - before[name].restarts
        if counted != (name in RUNNING):
            yield f"{name}: {counted} restarts were counted"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.upgrade", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("ref", metavar="REF", help="the version to upgrade from")
    console = Console(highlight=False)
    with checkout(parser.parse_args(argv).ref) as earlier, cluster_started() as kubectl:
        new = load_images()
        old, chart = images_of(earlier), earlier / CHART.relative_to(ROOT)
        with (
            operator_installed(kubectl, old, chart=chart, **values_of(earlier, old)),
            _tenant(kubectl) as history,
        ):
            jobs = {name: Scenario(history.kubectl, history, "", name) for name in (*RUNNING, SUSPENDED, FINISHED)}
            begin(jobs)
            before = {name: seen(jobs[name]) for name in (*RUNNING, SUSPENDED)}
            over = _end_of(jobs[FINISHED])
            console.print(f"before: {before}")
            began = time.monotonic()
            upgrade(kubectl, new)
            console.print(f"upgraded in {time.monotonic() - began:.1f} s")
            for name, step in {name: step_of(jobs[name]) for name in RUNNING}.items():
                eventually(
                    lambda name=name, step=step: step_of(jobs[name]) > step + 20,
                    f"{name} trains on",
                    120,
                    lambda: describe(history.kubectl) + kubectl.within(NAMESPACE).logs(f"deployment/{RELEASE}"),
                )
            wrong = [*check(jobs, before, over)]
            console.print("pods, attempts and counters are as before" if not wrong else "\n".join(wrong))
            wrong += go_on(jobs, before)
    console.print("\n".join(wrong) if wrong else "all jobs go on from their snapshots")
    return 1 if wrong else 0


@contextmanager
def _tenant(kubectl: Kubectl) -> Iterator[History]:
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TENANT}})
    try:
        # an API server forgets the changes of a resource before its definition's
        with History(kubectl.within(TENANT), relist=True) as history:
            yield history
    finally:
        kubectl.delete("namespace", TENANT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
