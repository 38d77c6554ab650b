"""The jobs that random faults hit: what they are, and what must be true of them in the end (chaos.py)."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.history import History
from tests.cluster.kube import Kubectl
from tests.cluster.scenario import Scenario
from tests.support.waiting import NeverHappened, eventually

PART_OF = "app.kubernetes.io/part-of"
FORCE = ("--grace-period=0", "--force")
STEP_SECONDS = 0.25
SEEN_LATE_SECONDS = 6.0
"""How much training the operator may not have heard of when a pod dies without a word: it asks every 2 s, and on a busy
machine its question waits."""

PACED = """
import os, time
from ddp_trainer.tasks.digits import Digits

class Paced(Digits):
    def loss(self, output, batch):
        if output.requires_grad:
            time.sleep(float(os.environ["PACE_SECONDS"]))
        return super().loss(output, batch)
"""

READ_ATTEMPTS = """
import json, pathlib, sys
found = []
for path in sorted(pathlib.Path("/mnt/shared/logs", sys.argv[1], "losses").glob("*.jsonl")):
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    steps = [line["step"] for line in lines if "step" in line]
    found.append([lines[0]["resumedAfter"], max(steps, default=lines[0]["resumedAfter"])])
print(json.dumps(found))
"""


@dataclass
class Job:
    """One job, and what the faults so far explain of its counters."""

    scenario: Scenario
    restarts: int = 0
    disruptions: int = 0
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.scenario.kubectl.namespace}/{self.scenario.name}"

    @property
    def status(self) -> dict[str, Any]:
        return self.scenario.status

    @property
    def over(self) -> bool:
        return self.status.get("phase") in ("Succeeded", "Failed")

    @property
    def attempt(self) -> int:
        return int(self.status.get("attempt", 0))

    def trains(self, beyond: int = 0) -> bool:
        """Whether its current attempt has made steps of its own and has a snapshot."""
        if self.status.get("phase") != "Running":
            return False
        report = self.scenario.report(0, self.attempt)
        if not report or not report["snapshot"] or report["phase"] != "train":
            return False
        return int(report["step"] or 0) > max(beyond, (report["resumedFromStep"] or 0) + 5)

    def apply(self, steps: int, pace: float = STEP_SECONDS) -> None:
        code = {"name": "code", "configMap": {"name": "paced"}}
        mount = {"name": "trainer", "volumeMounts": [{"name": "code", "mountPath": "/opt/user"}]}
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "/opt/user", "PACE_SECONDS": str(pace)}
        self.scenario.apply(
            args=["--task=paced:Paced", f"--epochs={steps}", f"--max-steps={steps}", "--log-every=1"],
            env=[{"name": name, "value": value} for name, value in variables.items()],
            podTemplate={"spec": {"volumes": [code], "containers": [mount]}},
            **self.spec,
        )


def counters_that_fall(statuses: list[dict[str, Any]]) -> list[str]:
    """A restart may be refunded where its cause turns out to be a lost node; nothing else ever goes back."""
    wrong = []
    for before, after in itertools.pairwise(statuses):
        if before.get("phase") in ("Succeeded", "Failed") and after.get("phase") != before["phase"]:
            wrong.append(f"phase went from {before['phase']} to {after.get('phase')}")
        refund = after.get("disruptions", 0) - before.get("disruptions", 0)
        fallen = before.get("restarts", 0) - after.get("restarts", 0)
        if fallen > max(refund, 0) or after.get("attempt", 0) not in (
            before.get("attempt", 0),
            before.get("attempt", 0) + 1,
        ):
            wrong.append(f"counters went from {before} to {after}")
    return wrong


def check_end(job: Job, unbroken: Job, image: str) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with a job that has come to its end, and its figures."""
    wrong, status = [], job.status
    if status.get("phase") != "Succeeded":
        return [f"{job.name} is {status.get('phase')}: {status.get('lastFailure')}"], {}
    records, whole = job.scenario.records(), unbroken.scenario.records()
    if records.trajectory != whole.trajectory:
        wrong.append(f"{job.name}: its losses are not those of the unbroken run")
    if records.weights != whole.weights:
        wrong.append(f"{job.name}: its weights are not those of the unbroken run")
    wrong += [f"{job.name}: {rule}" for rule in counters_that_fall(job.scenario.statuses)]
    attempts = json.loads(job.scenario.kubectl.python(job.scenario.reader, READ_ATTEMPTS, job.scenario.name))
    true = sum(max(0, last - after) for (_, last), (after, _) in itertools.pairwise(attempts))
    counted = int((status.get("goodput") or {}).get("recomputedSteps", 0))
    unseen = int(SEEN_LATE_SECONDS / STEP_SECONDS) * (len(attempts) - 1)
    if not true - unseen <= counted <= true + len(attempts):
        wrong.append(f"{job.name}: {counted} steps are called lost, {true} were made again")
    return wrong, {
        "restarts": status.get("restarts", 0),
        "disruptions": status.get("disruptions", 0),
        "steps lost": f"{counted} (true: {true})",
        "goodput": f"{(status.get('goodput') or {}).get('ratio', 0):.0%}",
    }


@contextmanager
def tenants(kubectl: Kubectl, image: str) -> Iterator[list[Job]]:
    """Three jobs of two tenants, and one that is left alone. What a run that was killed left behind goes first."""
    kubectl.run("delete", "namespaces", "--selector", f"{PART_OF}=ddpjob-chaos", "--wait=false")
    with ExitStack() as stack:
        made: dict[str, tuple[Kubectl, History]] = {}
        for tenant in ("one", "two", "alone"):
            own = kubectl.within(f"ddpjob-chaos-{tenant}-{secrets.token_hex(3)}")
            metadata = {"name": own.namespace, "labels": {PART_OF: "ddpjob-chaos"}}
            kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
            stack.callback(own.delete, "namespace", own.namespace)
            own.apply(
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "paced"}, "data": {"paced.py": PACED}}
            )
            made[tenant] = own, stack.enter_context(History(own, relist=True))
        restart = {"maxRestarts": 1000, "backoff": {"initialSeconds": 0}, "excludeNodeAfter": 0}
        specs = [
            ("one", "gang", {"restart": restart}),
            ("one", "inplace", {"restart": restart | {"scope": "InPlace"}}),
            ("two", "gang", {"restart": restart, "placement": {"onePodPerNode": True}}),
            ("alone", "gang", {}),
        ]
        yield [Job(Scenario(*made[tenant], image, name), spec=spec) for tenant, name, spec in specs]


def left_over(jobs: list[Job]) -> list[str]:
    """Delete all jobs; what of them is still there a minute later. Claims are kept on purpose."""
    for job in jobs:
        job.scenario.kubectl.delete("ddpjob", job.scenario.name)
        job.scenario.kubectl.delete("pod", job.scenario.reader, *FORCE)
    kinds = "ddpjobs,pods,services,networkpolicies"

    def gone() -> bool:
        return not [item for job in jobs for item in job.scenario.kubectl.list(kinds)]

    try:
        eventually(gone, "all that belonged to the jobs is gone", 90)
    except NeverHappened:
        return [f"left over: {item['kind']} {item['metadata']['name']}"
                for job in jobs for item in job.scenario.kubectl.list(kinds)]  # fmt: skip
    return []
