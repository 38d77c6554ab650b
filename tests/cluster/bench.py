"""How long a job takes to its first optimizer step, and back to it after a loss, beside the same pods started by hand.

    python -m tests.cluster.bench [--rounds 5]

The floor is what the cluster and the image cost anyway: `kubectl apply` of a claim, a Service and two pods that differ
from the operator's in one thing, their command is plain torchrun. Both kinds take turns, so that a busy machine slows
both. Steps are timed by the trainer, in its own records; what is printed are medians, and the ratio that counts.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from tests.cluster.byhand import ByHand, free_address
from tests.cluster.history import History
from tests.cluster.installation import cluster_started, load_images, operator_installed
from tests.cluster.kube import Kubectl
from tests.cluster.scenario import NODES, Scenario

TARGET = 1.15
"""The most that a first step may take, as a multiple of the floor."""

SHORT = ["--task=digits", "--max-steps=5"]
LONG = ["--task=digits", "--epochs=24"]
HIT = 100
"""The step from which on a job is hit."""


@dataclass(frozen=True, slots=True)
class Start:
    """When things happened on the way to a first step, in seconds since the epoch."""

    asked: float
    created: float
    running: float
    ready: float
    stepped: float

    @property
    def seconds(self) -> float:
        return self.stepped - self.asked

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """Seconds to the last pod's creation, to all pods running, to the start of training, and for the first step."""
        return (
            self.created - self.asked,
            self.running - self.created,
            self.ready - self.running,
            self.stepped - self.ready,
        )


def start_of_job(scenario: Scenario) -> Start:
    """A DDPJob, from `kubectl apply` on."""
    asked = time.time()
    scenario.apply(args=SHORT, shared={"retain": False})
    scenario.wait_phase("Succeeded")
    return _timeline(scenario, asked, attempt=0, pods=[f"{scenario.name}-0-{rank}" for rank in range(NODES)])


def start_by_hand(scenario: Scenario, floor: ByHand) -> Start:
    """The same pods with plain torchrun, from `kubectl apply` on."""
    objects = floor.objects(scenario.name, free_address(scenario.kubectl), SHORT)
    names = [f"{scenario.name}-{rank}" for rank in range(NODES)]
    asked = time.time()
    scenario.kubectl.apply(*objects)
    scenario.history.wait(
        lambda: all(_phase(scenario, name) == "Succeeded" for name in names), "the pods by hand are done"
    )
    return _timeline(scenario, asked, attempt=0, pods=names)


def _timeline(scenario: Scenario, asked: float, attempt: int, pods: list[str]) -> Start:
    records = scenario.records()
    started = records.event("resumed", attempt) or records.event("started", attempt)
    stepped = records.event("first_step", attempt)
    assert started is not None, records.events
    assert stepped is not None, records.events
    changes = [change for change in scenario.history.of("pods") if change.name in pods]
    created = {change.name: change.time for change in reversed(changes)}
    running = {change.name: change.time for change in reversed(changes) if change.status.get("phase") == "Running"}
    return Start(asked, max(created.values()), max(running.values()), started["time"], stepped["time"])


def _phase(scenario: Scenario, pod: str) -> str:
    return str(((scenario.history.latest("pods", pod) or {}).get("status") or {}).get("phase"))


def loss_of_rank(scenario: Scenario) -> Start:
    """From SIGKILL of rank 0's process to the next optimizer step."""
    scenario.wait_trained(HIT)
    asked = scenario.kill_rank(0)
    return _after_loss(scenario, asked)


def loss_of_pod(scenario: Scenario) -> Start:
    """From `kubectl delete pod --force` of the worker to the next optimizer step."""
    scenario.wait_trained(HIT)
    asked = time.time()
    scenario.delete_pod(1, "--grace-period=0", "--force")
    return _after_loss(scenario, asked)


def _after_loss(scenario: Scenario, asked: float) -> Start:
    scenario.wait_phase("Succeeded")
    return _timeline(scenario, asked, attempt=1, pods=[f"{scenario.name}-1-{rank}" for rank in range(NODES)])


def measured(kubectl: Kubectl, image: str, name: str, measure: Callable[[Scenario], Start]) -> Start:
    """One measurement in a namespace of its own."""
    own = kubectl.within(f"ddpjob-bench-{name}-{secrets.token_hex(3)}")
    kubectl.run("create", "namespace", own.namespace)
    try:
        with History(own) as history:
            return measure(Scenario(own, history, image, name))
    finally:
        _remove(own)


def _remove(own: Kubectl) -> None:
    """Do not wait: every pod has ended, and what a kubelet still tidies up costs the next measurement nothing to
    speak of, while waiting for it takes longer than the measurement.
    """
    own.delete("namespace", own.namespace)


def _then(prepare: Callable[[Scenario], None], measure: Callable[[Scenario], Start]) -> Callable[[Scenario], Start]:
    def both(scenario: Scenario) -> Start:
        prepare(scenario)
        return measure(scenario)

    return both


def _train_long(scenario: Scenario) -> None:
    scenario.apply(args=LONG, shared={"retain": False})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind (default: %(default)s)")
    rounds = parser.parse_args().rounds
    console = Console(stderr=True)
    starts: dict[str, list[Start]] = {}
    with cluster_started() as kubectl, operator_installed(kubectl, images := load_images()):
        floor = ByHand.copied_from(measured_pods(kubectl, images.trainer))
        kinds: dict[str, Callable[[Scenario], Start]] = {
            "by hand": lambda scenario: start_by_hand(scenario, floor),
            "DDPJob": start_of_job,
            "rank killed": _then(_train_long, loss_of_rank),
            "pod killed": _then(_train_long, loss_of_pod),
        }
        for turn in range(rounds):
            for kind, measure in kinds.items():
                start = measured(kubectl, images.trainer, kind.lower().replace(" ", "-"), measure)
                starts.setdefault(kind, []).append(start)
                console.print(f"round {turn + 1} of {rounds}, {kind}: {start.seconds:.2f} s")
    report(starts)
    return 0


def report(starts: dict[str, list[Start]]) -> None:
    """A table of medians, and whether the target is met."""
    table = Table(title="seconds to the first optimizer step: median (least to most), and medians of its parts")
    for column in ("", "in all", "ratio", "pods created", "pods running", "training begins", "first step"):
        table.add_column(column, justify="left" if not column else "right")
    floor = statistics.median(start.seconds for start in starts["by hand"])
    for kind, found in starts.items():
        seconds = [start.seconds for start in found]
        median = statistics.median(seconds)
        parts = (statistics.median(part) for part in zip(*(start.parts for start in found), strict=True))
        spread = f"{median:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        table.add_row(kind, spread, f"{median / floor:.2f}", *(f"{part:.2f}" for part in parts))
    console = Console(width=120)
    console.print(table)
    ratio = statistics.median(start.seconds for start in starts["DDPJob"]) / floor
    verdict = "met" if ratio <= TARGET else "missed"
    console.print(f"apply to first step, DDPJob to by hand: {ratio:.2f}; target at most {TARGET}: {verdict}")


def measured_pods(kubectl: Kubectl, image: str) -> list[dict[str, object]]:
    """The pods that the operator makes for the job that is measured. Also warms every cache that a first run fills."""
    own = kubectl.within(f"ddpjob-bench-warm-{secrets.token_hex(3)}")
    kubectl.run("create", "namespace", own.namespace)
    try:
        with History(own) as history:
            scenario = Scenario(own, history, image, "warm")
            start_of_job(scenario)
            return scenario.pods(0)
    finally:
        _remove(own)


if __name__ == "__main__":
    sys.exit(main())
