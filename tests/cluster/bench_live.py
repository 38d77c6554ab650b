"""How long the other ranks of a gang wait for their next optimizer step after one is lost, by `restart.scope`.

    python -m tests.cluster.bench_live [--rounds 10] [--other-rounds 5] [--other-node-rounds 2]

One job of three pods for each scope, one after the other: its rank is killed, its pods are deleted by force, and a node
loses its power, in turns. Moments are those of the one machine that all nodes share: of the fault, and of the end of
the next step in the trainer's own records. With Gang and InPlace that is the first step of the next attempt, and steps
since the last snapshot are made again; with Live it is the next step of the ranks that are left. What the others wait
for a rank that joins them is measured by rank 0.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.cluster.history import History
from tests.cluster.installation import cluster_started, load_images, node_lost, operator_installed, wait_operator
from tests.cluster.kube import Kubectl
from tests.cluster.scenario import Scenario, reader_pod
from tests.kubernetes import Impossible
from tests.support.waiting import eventually

NODES = 3
SCOPES = ("Gang", "InPlace", "Live")
ARGS = ["--task=digits", "--epochs=1000000", "--strategy=ddp", "--device=cpu", "--global-batch=48"]
STEPS_BETWEEN = 50
"""After each fault, until the next."""
SECONDS = 300.0
FORCE = ("--grace-period=0", "--force", "--wait=false")
TARGETS = {"rank killed": 1.0, "pod deleted": 1.0, "pod of node rank 0 deleted": 2.0}
"""Seconds, with Live."""
PAUSE_TARGET = 0.3

READ = """
import json, pathlib, sys
file = pathlib.Path("/mnt/shared/logs") / sys.argv[1] / "events.jsonl"
wanted = ("first_step", "recovered", "joined", "regrouped")
print(json.dumps([one for line in file.read_text().splitlines() if (one := json.loads(line))["event"] in wanted]))
"""


class Run:
    """A job that is hit again and again."""

    def __init__(self, scenario: Scenario, scope: str) -> None:
        self.scenario, self.scope = scenario, scope
        self._kubectl = scenario.kubectl

    def begin(self, image: str, reader_node: str) -> None:
        restart = {"scope": self.scope, "maxRestarts": 1000, "backoff": {"initialSeconds": 0}, "nodeLostSeconds": 1}
        # a node is not to be kept away from for what is done to it here
        self.scenario.apply(args=ARGS, nodes=NODES, restart=restart | {"excludeNodeAfter": 0})
        self.scenario.wait_phase("Running")
        reader = reader_pod(self.scenario.reader, f"{self.scenario.name}-shared", image)
        reader["spec"]["nodeName"] = reader_node
        self._kubectl.apply(reader)
        self.settle()

    def settle(self) -> None:
        """Until all ranks train together, some steps after the last fault."""
        steps = [0]

        def together() -> object:
            status = self.scenario.status
            if status.get("phase") != "Running" or status["nodes"].get("ready") != NODES:
                return False
            reports = [self.scenario.report(rank, status.get("attempt", 0)) for rank in range(NODES)]
            if not all(report and report["phase"] == "train" for report in reports):
                return False
            now = [report["step"] for report in reports if report]
            begun, steps[0] = steps[0] or min(now), steps[0] or min(now)
            return min(now) >= begun + STEPS_BETWEEN and max(now) - min(now) <= STEPS_BETWEEN

        eventually(together, f"{NODES} ranks train together", SECONDS)
        if self.scope == "Live" and (groups := self.events("regrouped", 0)):
            assert groups[-1]["worldSize"] == NODES

    def events(self, kind: str, after: float) -> list[dict[str, Any]]:
        read = json.loads(self._kubectl.python(self.scenario.reader, READ, self.scenario.name))
        return [event for event in read if event["event"] == kind and event["time"] > after]

    def next_step(self, hit: float) -> float:
        """Seconds from a fault to the end of the next step."""
        kind = "recovered" if self.scope == "Live" else "first_step"
        (event, *_) = eventually(lambda: self.events(kind, hit), f"{kind} after the fault", SECONDS)
        return float(event["time"] - hit)

    # Faults; each returns its moment, in seconds since the epoch

    def _attempt(self) -> int:
        return int(self.scenario.status.get("attempt", 0))

    def nodes(self) -> set[str]:
        """Those that its pods are on."""
        pods = [self.scenario.pod(rank, self._attempt()) for rank in range(NODES)]
        return {pod["spec"]["nodeName"] for pod in pods if pod}

    def kill_rank(self) -> float:
        return self.scenario.kill_rank(1, attempt=self._attempt())

    def delete_pod(self, node_rank: int) -> float:
        now = time.time()
        self.scenario.delete_pod(node_rank, *FORCE, attempt=self._attempt())
        return now


@contextmanager
def running(kubectl: Kubectl, image: str, scope: str, reader_node: str) -> Iterator[Run]:
    own = kubectl.within(f"ddpjob-bench-live-{scope.lower()}-{secrets.token_hex(3)}")
    kubectl.run("create", "namespace", own.namespace)
    try:
        with History(own, relist=True) as history:
            run = Run(Scenario(own, history, image, scope.lower()), scope)
            run.begin(image, reader_node)
            yield run
    finally:
        own.delete("namespace", own.namespace)


def hits(run: Run, rounds: int, found: dict[str, list[float]], console: Console) -> None:
    faults: dict[str, Callable[[], float]] = {
        "rank killed": run.kill_rank,
        "pod deleted": lambda: run.delete_pod(1),
        "pod of node rank 0 deleted": lambda: run.delete_pod(0),
    }
    began = time.time()
    for turn in range(rounds):
        for kind, hit in faults.items():
            seconds = run.next_step(hit())
            found.setdefault(kind, []).append(seconds)
            console.print(f"{run.scope}, round {turn + 1} of {rounds}, {kind}: {seconds:.2f} s")
            run.settle()
    for event in run.events("joined", began):
        found.setdefault("pause for a rank that joins", []).append(event["seconds"])


def power_cuts(run: Run, operators_node: str, rounds: int, found: dict[str, list[float]], console: Console) -> None:
    """Of the node that the operator is not on, if a pod of the job is."""
    for turn in range(rounds):
        on = run.nodes() - {operators_node}
        if not on:  # those of the last node are all on the operator's now
            run.delete_pod(NODES - 1)
            run.settle()
            on = run.nodes() - {operators_node}
        if not on:
            console.print(f"{run.scope}: no pod is on another node than the operator's; its power cut is left out")
            return
        with node_lost(min(on), power=True) as died:
            seconds = run.next_step(died)
        found.setdefault("node loses its power", []).append(seconds)
        console.print(f"{run.scope}, round {turn + 1} of {rounds}, node loses its power: {seconds:.2f} s")
        run.settle()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.bench_live", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="faults of each kind, with Live (default: %(default)s)")
    parser.add_argument("--other-rounds", type=int, default=5, help="with Gang and InPlace (default: %(default)s)")
    parser.add_argument("--other-node-rounds", type=int, default=2, help="power cuts with them (default: %(default)s)")
    given = parser.parse_args()
    console = Console(stderr=True)
    found: dict[str, dict[str, list[float]]] = {scope: {} for scope in SCOPES}
    try:
        with cluster_started() as kubectl, operator_installed(kubectl, images := load_images()) as system:
            pod = system.get("pod", wait_operator(system))
            assert pod is not None
            node = pod["spec"]["nodeName"]  # which stays
            for scope in SCOPES:
                live = scope == "Live"
                with running(kubectl, images.trainer, scope, node) as run:
                    hits(run, given.rounds if live else given.other_rounds, found[scope], console)
                    power_cuts(run, node, given.rounds if live else given.other_node_rounds, found[scope], console)
    except Impossible as missing:
        raise SystemExit(str(missing)) from None
    finally:
        code = report(found)
    return code


def report(found: dict[str, dict[str, list[float]]]) -> int:
    """Medians, and whether those of Live are within their targets."""
    table = Table(title="seconds from a fault to the next optimizer step: median (least to most)")
    for column in ("", *SCOPES, "target of Live"):
        table.add_column(column, justify="right" if column else "left")
    kinds = list(dict.fromkeys(kind for of_scope in found.values() for kind in of_scope))
    missed = []
    for kind in kinds:
        target = PAUSE_TARGET if kind.startswith("pause") else TARGETS.get(kind)
        cells = [_cell(found[scope].get(kind, [])) for scope in SCOPES]
        table.add_row(kind, *cells, "" if target is None else f"≤ {target:g}")
        live = found["Live"].get(kind)
        if target is not None and live and statistics.median(live) > target:
            missed.append(kind)
    console = Console(width=120)
    console.print(table)
    if missed:
        console.print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


def _cell(seconds: list[float]) -> str:
    if not seconds:
        return ""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    sys.exit(main())
