"""Faults at random on a real cluster of two nodes, and what must be true of three jobs of two tenants in the end.

    python -m tests.cluster.chaos --seed 1 --minutes 10 [--record]

Ranks, pods and nodes die, alone or together with the operator, the API server or DNS, at moments and in an order that
follow from the seed. Every other strike has a second one, which hits the next attempt of a job while that starts. Then
all jobs train again before the next strike, so that what each one costs is known: restarts and disruptions are compared
after each. In the end every job has succeeded, with the losses and weights of a run that was left alone; the steps that
the ledger calls lost are those that the trainers made again; no pair of attempt and node rank had two pods that began,
and no counter fell, in the whole history that etcd has (a watch misses changes while the API server is down); and
nothing is left. The elastic job goes on with one node while the other is gone; from then on its losses are those of the
run that was left alone but for the order of summation.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.cluster.chaos_jobs import FORCE, STEP_SECONDS, Hit, Job, check_end, left_over, tenants
from tests.cluster.history import nodes_with_two_pods
from tests.cluster.installation import cluster_started, load_images, node_lost, operator_installed, wait_operator
from tests.cluster.kube import Kubectl, KubectlFailed, describe
from tests.cluster.scenario import NODES
from tests.kubernetes import Impossible, script
from tests.support.waiting import NeverHappened, eventually

FIGURES = Path(__file__).parents[2] / "docs" / "reliability.json"
SHARE_OF_TRAINING = 0.5
"""Of the time of the faults; the rest goes into restarts."""
START_SECONDS = 600.0
RECOVERY_SECONDS = 400.0


Fault = Callable[[Job], Hit]


@dataclass(frozen=True, slots=True)
class Again:
    """A second strike: at the next attempt of a job, so many seconds after that can be hit."""

    job: Job
    fault: Fault
    delay: float


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

    # Faults of one job.

    def kill_rank(self, job: Job) -> Hit:
        return self._signal_rank(job, signal.SIGKILL)

    def stop_rank(self, job: Job) -> Hit:
        return self._signal_rank(job, signal.SIGSTOP)

    def _signal_rank(self, job: Job, number: signal.Signals) -> Hit:
        rank = self.chance.randrange(NODES)
        eventually(lambda: job.has_ranks(rank), f"{job.name} has a process of node rank {rank}", RECOVERY_SECONDS)
        job.scenario.kill_rank(rank, number, attempt=job.attempt)
        return Hit(1, 0)

    def delete_pod(self, job: Job) -> Hit:
        pod = self._some_pod(job)
        job.scenario.kubectl.delete("pod", pod["name"], *FORCE)
        return Hit(1, 0, pod["uid"])

    def evict_pod(self, job: Job) -> Hit:
        """As `kubectl drain` does."""
        pod, minor = self._some_pod(job), self.kubectl.minor_version()
        version = "policy/v1" if minor >= 22 else "policy/v1beta1"
        metadata = {"name": pod["name"], "namespace": pod["namespace"]}
        body = {"apiVersion": version, "kind": "Eviction", "metadata": metadata}
        path = f"/api/v1/namespaces/{pod['namespace']}/pods/{pod['name']}/eviction"
        job.scenario.kubectl.run("create", "--raw", path, "-f", "-", given=json.dumps(body))
        # the condition DisruptionTarget, by which an eviction is told from a deletion, is there since 1.26
        return Hit(0, 1, pod["uid"]) if minor >= 26 else Hit(1, 0, pod["uid"])

    def _some_pod(self, job: Job) -> dict[str, str]:
        """Metadata of a node of the current attempt."""
        rank = self.chance.randrange(NODES)
        pod = eventually(
            lambda: job.scenario.pod(rank, job.attempt), f"{job.name} has node rank {rank}", RECOVERY_SECONDS
        )
        return {name: str(pod["metadata"][name]) for name in ("name", "namespace", "uid")}

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
        of_starting = [self.kill_rank, self.delete_pod, self.evict_pod]  # one that is stopped may import for minutes
        of_control = [self.kill_operator, self.kill_operator, self.kill_api_server, self.kill_dns]
        power_at = self.chance.uniform(0.2, 0.5) * seconds
        while time.monotonic() - self.began < seconds and not any(job.over for job in self.jobs):
            if not self.nodes_died and time.monotonic() - self.began >= power_at:
                self.nodes_died = True
                self.lose_node(f"node-{self.chance.randint(1, 2)}", self.chance.choice([3.0, 45.0]))
                continue
            victims = self.chance.sample(self.jobs, self.chance.choice([1, 1, 2, 3]))
            chosen = [(job, self.chance.choice(of_jobs)) for job in victims]
            again = Again(victims[0], self.chance.choice(of_starting), self.chance.choice([0.0, 0.3, 1.0, 3.0]))
            twice = self.chance.choice([True, False])
            control = self.chance.choice([None, *of_control])
            delay = self.chance.choice([0.0, 0.3, 1.0, 3.0])
            self.strike(chosen, again if twice else None, control, delay)
            time.sleep(self.chance.uniform(0, 3))

    def strike(
        self,
        chosen: list[tuple[Job, Fault]],
        again: Again | None,
        control: Callable[[], None] | None,
        delay: float,
    ) -> None:
        said = [f"{fault.__name__} {job.name}" for job, fault in chosen]
        before, attempts = time.monotonic(), {job.name: job.attempt for job in self.jobs}
        self.console.print(f"{before - self.began:6.1f} s  {'; '.join(said)}", markup=False)
        for job, fault in chosen:
            job.hits.append(fault(job))
        if again is not None:
            said.append(self.strike_again(again, attempts[again.job.name]))
        if control is not None:
            time.sleep(delay)
            said.append(f"{control.__name__} {delay:g} s later")
            control()
        self.recovered(before, "; ".join(said))

    def strike_again(self, again: Again, attempt: int) -> str:
        """Hit a job in the attempt after this one, before it trains again, and say what was done."""
        job = again.job
        eventually(
            lambda: job.over or (job.attempt > attempt and job.can_be_hit),
            f"attempt {attempt + 1} of {job.name} has pods",
            RECOVERY_SECONDS,
            lambda: describe(job.scenario.kubectl),
        )
        time.sleep(again.delay)
        if job.over:
            return f"{job.name} is over"
        phase = job.status["phase"]
        job.hits.append(again.fault(job))
        what = f"{again.fault.__name__} {job.name} while it is {phase}"
        self.console.print(f"{time.monotonic() - self.began:6.1f} s  {what}", markup=False)
        return what

    def lose_node(self, node: str, seconds: float) -> None:
        """Its power is cut; it is back after a time. A lost node costs no restart, and one or two disruptions."""
        hit = [job for job in self.jobs if self._pods_on(job, node)]
        before, counted = time.monotonic(), {job.name: job.counted[1] for job in hit}
        with node_lost(node, power=True):
            time.sleep(seconds)
        for job in hit:
            job.hits.append(Hit(0, 1))
        self.recovered(before, f"power of {node} cut for {seconds:g} s", check=False)
        for job in hit:
            lost = job.counted[1] - counted[job.name]
            if lost == 2:
                job.hits.append(Hit(0, 1))
            if not 1 <= lost <= 2:
                self.wrong.append(f"{job.name}: a lost node counted as {lost} disruptions")
        self._compare(f"power of {node}")

    def _pods_on(self, job: Job, node: str) -> list[str]:
        pods = [job.scenario.pod(rank, job.attempt) for rank in range(NODES)]
        return [pod["metadata"]["name"] for pod in pods if pod and pod["spec"].get("nodeName") == node]

    def recovered(self, since: float, what: str, *, check: bool = True) -> None:
        def done(job: Job) -> bool:
            counted, is_whole = sum(job.counted), job.status["nodes"]["total"] == NODES
            is_counted = job.settled and counted >= sum(job.explained) and job.attempt >= counted
            return job.over or (is_counted and is_whole and job.trains())

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
            restarts, disruptions = job.explained
            if job.counted not in {(restarts, disruptions + more) for more in range(job.lingered + 1)}:
                last = [(f["attempt"], f["reason"], f["message"][:120]) for f in job.status.get("failures", [])[-3:]]
                self.wrong.append(
                    f"{job.name} after {what}: restarts and disruptions are {job.counted}, which the faults explain as "
                    f"{job.explained}; {last}"
                )
                self.console.print(self.wrong[-1], markup=False)
            job.settle()


def run(
    kubectl: Kubectl, image: str, seed: int, minutes: float, console: Console
) -> tuple[Chaos, list[dict[str, Any]]]:
    steps = int(SHARE_OF_TRAINING * minutes * 60 / STEP_SECONDS)
    with tenants(kubectl, image) as (jobs, unbroken):
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
            alone = list({job.name: job for job in unbroken}.values())
            for job in alone:
                job.apply(steps, pace=0)
            for job in [*jobs, *alone]:
                job.scenario.wait_phase("Succeeded", seconds=600 + 60 * minutes)
            for job, like_it in zip(jobs, unbroken, strict=True):
                wrong, found = check_end(job, like_it, image)
                chaos.wrong += wrong
                figures.append({"job": job.name} | found)
            recreated = {pod for job in jobs for pod in job.recreated}
            for history in {id(job.scenario.history): job.scenario.history for job in jobs}.values():
                began = [one for one in history.stored() if one.object["metadata"]["uid"] not in recreated]
                chaos.wrong += nodes_with_two_pods(began)
            chaos.wrong += left_over([*jobs, *alone])
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
