"""How long it takes from `kubectl apply` of a job that cannot start until its status says why.

    python -m tests.cluster.bench_causes [--rounds 3]

Each cause is a job of its own, one after another, so that none waits for the others. The clock starts when kubectl has
returned and stops when a watch brings the condition.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import time
from dataclasses import replace
from itertools import product

from rich.console import Console
from rich.table import Table
from tests.cluster.causes import CAUSES, Cause, apply, prepare, quota_is_in_force, wait_degraded
from tests.cluster.history import History
from tests.cluster.installation import cluster_started, load_images, operator_installed
from tests.cluster.kube import Kubectl
from tests.support.waiting import eventually

TARGET_SECONDS = 5.0


def seconds_to_condition(kubectl: Kubectl, history: History, cause: Cause) -> float:
    """From the answer to `kubectl apply` to the condition. The job is deleted afterwards; its pods may take longer."""
    apply(kubectl, cause)
    asked = time.time()
    wait_degraded(history, cause)
    seconds = time.time() - asked
    kubectl.delete("ddpjob", cause.name)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.bench_causes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each cause (default: %(default)s)")
    rounds = parser.parse_args().rounds
    console = Console(stderr=True)
    found: dict[str, list[float]] = {cause.name: [] for cause in CAUSES}
    with cluster_started() as kubectl, operator_installed(kubectl, load_images()):
        own = kubectl.within(f"ddpjob-bench-causes-{secrets.token_hex(3)}")
        kubectl.run("create", "namespace", own.namespace)
        try:
            prepare(own)
            eventually(lambda: quota_is_in_force(own), "the quota is in force")
            with History(own) as history:
                # an operator that was just installed acts once it holds the Lease, which is not what is measured
                seconds_to_condition(own, history, replace(CAUSES[0], name="first"))
                for turn, cause in product(range(rounds), CAUSES):
                    seconds = seconds_to_condition(own, history, replace(cause, name=f"{cause.name}-{turn}"))
                    found[cause.name].append(seconds)
                    console.print(f"round {turn + 1} of {rounds}, {cause.name}: {seconds:.2f} s")
        finally:
            kubectl.delete("namespace", own.namespace)
    return report(found)


def report(found: dict[str, list[float]]) -> int:
    """A table, and whether the slowest of all is within the target."""
    table = Table(title="seconds from apply to the condition")
    for column in ("cause", "reason", "median", "least", "most"):
        table.add_column(column, justify="left" if column in ("cause", "reason") else "right")
    for cause in CAUSES:
        seconds = found[cause.name]
        shown = (statistics.median(seconds), min(seconds), max(seconds))
        table.add_row(cause.name, cause.reason, *(f"{value:.2f}" for value in shown))
    console = Console(width=100)
    console.print(table)
    worst = max(max(seconds) for seconds in found.values())
    met = worst <= TARGET_SECONDS
    console.print(f"slowest: {worst:.2f} s; target at most {TARGET_SECONDS:g} s: {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
