"""Faults at random on a real cluster of two nodes, and what must be true of three jobs of two tenants in the end.

    python -m tests.cluster.chaos --seed 1 --minutes 10 [--record]

Ranks, pods and nodes die, alone or together with the operator, the API server or DNS, at moments and in an order that
follow from the seed. A fault that hits jobs is followed by the next one once all jobs train again, so that what each
one costs is known: its restarts and disruptions are compared after each fault. In the end every job has succeeded, with
the losses and weights of a run that was left alone; the steps that the ledger calls lost are those that the trainers
made again; no pair of attempt and node rank had two pods; and nothing is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.cluster.chaos_jobs import FORCE, STEP_SECONDS, Job, check_end, left_over, tenants
from tests.cluster.history import nodes_with_two_pods
from tests.cluster.installation import cluster_started, load_images, node_lost, operator_installed, wait_operator
from tests.cluster.kube import Kubectl, KubectlFailed, describe
from tests.kubernetes import Impossible, script
from tests.support.waiting import NeverHappened, eventually

FIGURES = Path(__file__).parents[2] / "docs" / "reliability.json"
SHARE_OF_TRAINING = 0.5
"""Of the time of the faults; the rest goes into restarts."""
START_SECONDS = 600.0
RECOVERY_SECONDS = 400.0


Fault = Callable[[Job], tuple[int, int]]


class Chaos:
    """The faults of one run, and what was found wrong."""

    def __init__(self, kubectl: Kubectl, jobs: list[Job], seed: int, console: Console) -> None:
        self.kubectl, self.jobs, self.console = kubectl, jobs, console
        self.chance = random.Random(seed)
        self.began = time.monotonic()
        self.faults: list[tuple[float, str, float]] = []
        """Seconds since the beginning, what was done, and seconds until all jobs trained again."""
        self.wrong: list[str] = []
        self.nodes_died = False

    # Faults of one job: each returns what it costs, (restarts, disruptions).

    def kill_rank(self, job: Job) -> tuple[int, int]:
        job.scenario.kill_rank(self.chance.randrange(2), attempt=job.attempt)
        return 1, 0

    def stop_rank(self, job: Job) -> tuple[int, int]:
        job.scenario.kill_rank(self.chance.randrange(2), signal.SIGSTOP, attempt=job.attempt)
        return 1, 0

    def delete_pod(self, job: Job) -> tuple[int, int]:
        job.scenario.delete_pod(self.chance.randrange(2), *FORCE, attempt=job.attempt)
        return 1, 0

    def evict_pod(self, job: Job) -> tuple[int, int]:
        """As `kubectl drain` does."""
        pod = job.scenario.pod_name(self.chance.randrange(2), job.attempt)
        minor = self.kubectl.minor_version()
        version = "policy/v1" if minor >= 22 else "policy/v1beta1"
        namespace = job.scenario.kubectl.namespace
        body = {"apiVersion": version, "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        job.scenario.kubectl.run("create", "--raw", path, "-f", "-", given=json.dumps(body))
        # the condition DisruptionTarget, by which an eviction is told from a deletion, is there since 1.26
        return (0, 1) if minor >= 26 else (1, 0)

    # Faults of the control plane: they cost nothing.

    def kill_operator(self) -> None:
        self.kubectl.within("ddpjob-system").run(
            "delete", "pods", "--selector=app.kubernetes.io/name=ddpjob-operator", "--wait=false", *FORCE
        )

    def kill_api_server(self) -> None:
        self._kill_daemon("apiserver")

    def kill_dns(self) -> None:
        self._kill_daemon("dns")

    def _kill_daemon(self, name: str) -> None:
        file = self.kubectl.kubeconfig.parent / "run" / f"{name}.pid"
        os.kill(int(file.read_text().split()[0]), signal.SIGKILL)
        time.sleep(self.chance.uniform(0.5, 4))
        script("cluster.sh", "up")

    def run(self, seconds: float) -> None:
        """Faults until the time is up or a job is over."""
        of_jobs = [self.kill_rank, self.kill_rank, self.delete_pod, self.delete_pod, self.evict_pod, self.stop_rank]
        of_control = [self.kill_operator, self.kill_operator, self.kill_api_server, self.kill_dns]
        power_at = self.chance.uniform(0.2, 0.5) * seconds
        while time.monotonic() - self.began < seconds and not any(job.over for job in self.jobs):
            if not self.nodes_died and time.monotonic() - self.began >= power_at:
                self.nodes_died = True
                self.lose_node(f"node-{self.chance.randint(1, 2)}", self.chance.choice([3.0, 45.0]))
                continue
            victims = self.chance.sample(self.jobs, self.chance.choice([1, 1, 2, 3]))
            chosen = [(job, self.chance.choice(of_jobs)) for job in victims]
            control = self.chance.choice([None, *of_control])
            delay = self.chance.choice([0.0, 0.3, 1.0, 3.0])
            self.strike(chosen, control, delay)
            time.sleep(self.chance.uniform(0, 3))

    def strike(
        self,
        chosen: list[tuple[Job, Callable[[Job], tuple[int, int]]]],
        control: Callable[[], None] | None,
        delay: float,
    ) -> None:
        said = [f"{fault.__name__} {job.name}" for job, fault in chosen]
        before = time.monotonic()
        self.console.print(f"{before - self.began:6.1f} s  {'; '.join(said)}", markup=False)
        for job, fault in chosen:
            restarts, disruptions = fault(job)
            job.restarts, job.disruptions = job.restarts + restarts, job.disruptions + disruptions
        if control is not None:
            time.sleep(delay)
            said.append(f"{control.__name__} {delay:g} s later")
            control()
        self.recovered(before, "; ".join(said))

    def lose_node(self, node: str, seconds: float) -> None:
        """Its power is cut; it is back after a time. A lost node costs no restart, and one or two disruptions."""
        hit = [job for job in self.jobs if self._pods_on(job, node)]
        before, counted = time.monotonic(), {job.name: job.status.get("disruptions", 0) for job in hit}
        with node_lost(node, power=True):
            time.sleep(seconds)
        for job in hit:
            job.disruptions = -1  # taken from the status below
        self.recovered(before, f"power of {node} cut for {seconds:g} s", check=False)
        for job in hit:
            job.disruptions = job.status.get("disruptions", 0)
            if not 1 <= job.disruptions - counted[job.name] <= 2:
                self.wrong.append(
                    f"{job.name}: a lost node counted as {job.disruptions - counted[job.name]} disruptions"
                )
        self._compare(f"power of {node}")

    def _pods_on(self, job: Job, node: str) -> list[str]:
        pods = [job.scenario.pod(rank, job.attempt) for rank in range(2)]
        return [pod["metadata"]["name"] for pod in pods if pod and pod["spec"].get("nodeName") == node]

    def recovered(self, since: float, what: str, *, check: bool = True) -> None:
        def done(job: Job) -> bool:
            counted = job.status.get("restarts", 0) + job.status.get("disruptions", 0)
            expected = job.restarts + max(job.disruptions, 0)
            return job.over or (counted >= expected and job.attempt >= counted and job.trains())

        for job in self.jobs:
            try:
                eventually(lambda job=job: done(job), f"{job.name} trains again after {what}", RECOVERY_SECONDS)
            except NeverHappened as never:
                self.wrong.append(str(never).strip())
                self.console.print(describe(job.scenario.kubectl)[-6000:], markup=False)
                raise
        took = time.monotonic() - since
        self.faults.append((since - self.began, what, took))
        self.console.print(f"{since - self.began:6.1f} s  {what}: all train again after {took:.1f} s", markup=False)
        if check:
            self._compare(what)

    def _compare(self, what: str) -> None:
        for job in self.jobs:
            found = (job.status.get("restarts", 0), job.status.get("disruptions", 0))
            if found != (job.restarts, job.disruptions):
                failures = [(f["attempt"], f["reason"], f["message"][:120]) for f in job.status.get("failures", [])][
                    -3:
                ]
                self.wrong.append(
                    f"{job.name} after {what}: restarts and disruptions are {found}, which the faults explain as "
                    f"{(job.restarts, job.disruptions)}; {failures}"
                )
                self.console.print(self.wrong[-1], markup=False)
                job.restarts, job.disruptions = found


def run(
    kubectl: Kubectl, image: str, seed: int, minutes: float, console: Console
) -> tuple[Chaos, list[dict[str, Any]]]:
    steps = int(SHARE_OF_TRAINING * minutes * 60 / STEP_SECONDS)
    with tenants(kubectl, image) as (*jobs, unbroken):
        chaos = Chaos(kubectl, jobs, seed, console)
        figures: list[dict[str, Any]] = []
        try:
            for job in jobs:
                job.apply(steps)
            for job in jobs:
                eventually(
                    job.trains, f"{job.name} trains", START_SECONDS, lambda job=job: describe(job.scenario.kubectl)
                )
            chaos.began = time.monotonic()
            chaos.run(minutes * 60)
            unbroken.apply(steps, pace=0)
            for job in [*jobs, unbroken]:
                job.scenario.wait_phase("Succeeded", seconds=600 + 60 * minutes)
            for job in jobs:
                wrong, found = check_end(job, unbroken, image)
                chaos.wrong += wrong
                figures.append({"job": job.name} | found)
                chaos.wrong += nodes_with_two_pods(job.scenario.history.changes) if job.scenario.name == "gang" else []
            chaos.wrong += left_over([*jobs, unbroken])
        except (NeverHappened, AssertionError, KubectlFailed) as error:
            chaos.wrong.append(str(error)[:3000])
        return chaos, figures


def report(chaos: Chaos, figures: list[dict[str, Any]]) -> None:
    console = Console(width=160)
    table = Table(title="faults")
    for column in ("second", "what", "all train again after"):
        table.add_column(column)
    for at, what, took in chaos.faults:
        table.add_row(f"{at:.0f}", what, f"{took:.1f} s")
    console.print(table)
    table = Table(title="jobs at their end")
    for column in ("job", "restarts", "disruptions", "steps lost", "goodput"):
        table.add_column(column)
    for found in figures:
        table.add_row(*(str(found.get(key, "")) for key in ("job", "restarts", "disruptions", "steps lost", "goodput")))
    console.print(table)
    for wrong in chaos.wrong:
        console.print(f"VIOLATION: {wrong}", markup=False)


def record(kubectl: Kubectl, chaos: Chaos, figures: list[dict[str, Any]], seed: int, minutes: float) -> None:
    """Into docs/reliability.json, in place of an earlier run of that seed and version."""
    version = kubectl.raw("/version")["gitVersion"].removeprefix("v").split("-")[0].split("+")[0]
    run = {
        "kubernetes": version,
        "seed": seed,
        "minutes": minutes,
        "faults": len(chaos.faults),
        "restarts": sum(found.get("restarts", 0) for found in figures),
        "disruptions": sum(found.get("disruptions", 0) for found in figures),
        "stepsLost": "; ".join(str(found.get("steps lost")) for found in figures),
        "violations": len(chaos.wrong),
    }
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else []
    known = [one for one in known if (one["kubernetes"], one["seed"]) != (version, seed)]
    FIGURES.write_text(json.dumps([*known, run], indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--record", action="store_true", help="write the figures into docs/reliability.json")
    given = parser.parse_args()
    try:
        with cluster_started() as kubectl, operator_installed(kubectl, images := load_images()):
            if script("cluster.sh", "choose").strip() != "debian":
                raise Impossible("nodes and daemons can only be killed where cluster.sh has made them on this host")
            wait_operator(kubectl)
            chaos, figures = run(kubectl, images.trainer, given.seed, given.minutes, Console(stderr=True, width=160))
            report(chaos, figures)
            if given.record:
                record(kubectl, chaos, figures, given.seed, given.minutes)
    except Impossible as missing:
        raise SystemExit(str(missing)) from None
    return 1 if chaos.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
