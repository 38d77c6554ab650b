"""The jobs that random faults hit: what they are, and what must be true of them in the end (chaos.py)."""

from __future__ import annotations

import itertools
import json
import math
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.history import Change, History
from tests.cluster.kube import Kubectl
from tests.cluster.scenario import NODES, Scenario
from tests.support.waiting import NeverHappened, eventually

PART_OF = "app.kubernetes.io/part-of"
FORCE = ("--grace-period=0", "--force")
STEP_SECONDS = 0.25
SEEN_LATE_SECONDS = 6.0
"""How much training the operator may not have heard of when a pod dies without a word: it asks every 2 s, and on a busy
machine its question waits."""

ELASTIC = {"minNodes": 1, "waitSeconds": 10}
ROUNDING = 1e-6
"""The most that a loss may be from that of another number of ranks, which add up in another order. In double precision:
training makes the smallest difference 100,000 times as large in 1,000 steps."""

PACED = """
import os, time
from torch.utils.data import TensorDataset
from ddp_trainer.tasks.digits import Digits

class Paced(Digits):
    def model(self):
        return super().model().double()

    def _split(self, *, held_out):
        images, labels = super()._split(held_out=held_out).tensors
        return TensorDataset(images.double(), labels)

    def loss(self, output, batch):
        if output.requires_grad:
            time.sleep(float(os.environ["PACE_SECONDS"]))
        return super().loss(output, batch)
"""

KUBELET_SECONDS = 10.0
"""What the operator gives a node to confirm that a pod is gone which had no container yet."""

READ_ATTEMPTS = """
import json, pathlib, sys
found = []
for path in sorted(pathlib.Path("/mnt/shared/logs", sys.argv[1], "losses").glob("*.jsonl")):
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    steps = [line["step"] for line in lines if "step" in line]
    found.append([lines[0]["resumedAfter"], max(steps, default=lines[0]["resumedAfter"])])
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Hit:
    """What a fault costs, and the uid of the pod that it has taken away, if it has."""

    restarts: int
    disruptions: int
    pod: str | None = None


@dataclass
class Job:
    """One job, and what the faults so far explain of its counters."""

    scenario: Scenario
    restarts: int = 0
    disruptions: int = 0
    """Both as they were compared last."""
    hits: list[Hit] = field(default_factory=list)
    """Since then."""
    recreated: set[str] = field(default_factory=set)
    """Uids of pods that were taken away before they began: their node rank has had another pod in the same attempt."""
    spec: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.2
    """Which features are dropped follows from the generators of the ranks, so it depends on how many there are."""

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

    @property
    def counted(self) -> tuple[int, int]:
        """Restarts and disruptions on record. Attempts that began for another size, which no fault explains one by one,
        are left out."""
        statuses = self.scenario.statuses or [{}]
        resized = {status["attempt"] for status in statuses for item in status.get("conditions", ())
                   if item["type"] == "Restarting" and item["reason"] in ("ScaledDown", "ScaledUp")}  # fmt: skip
        return statuses[-1].get("restarts", 0), statuses[-1].get("disruptions", 0) - len(resized)

    @property
    def explained(self) -> tuple[int, int]:
        """Restarts and disruptions that the faults explain. A pod that never began is created again, at no cost."""
        counted = [hit for hit in self.hits if not self.never_began(hit)]
        restarts, disruptions = (sum(getattr(hit, what) for hit in counted) for what in ("restarts", "disruptions"))
        return self.restarts + restarts, self.disruptions + disruptions

    @property
    def settled(self) -> bool:
        """Whether all pods that were hit are gone, so that it is known whether they had begun."""
        return all(last is None or last.type == "DELETED" for last in map(self.last_of, self.hits))

    def settle(self) -> None:
        """What is on record is what the next faults add to."""
        self.recreated |= {hit.pod for hit in self.hits if hit.pod and self.never_began(hit)}
        self.hits.clear()
        self.restarts, self.disruptions = self.counted

    def never_began(self, hit: Hit) -> bool:
        """Whether the last that is known of the pod is that it waits for its container."""
        last = self.last_of(hit)
        return last is not None and last.status.get("phase") == "Pending"

    @property
    def lingered(self) -> int:
        """How many of the pods that never began were there for longer than a node may take to confirm a deletion, as
        after an outage of the API server. Each may have cost a disruption: the node was taken for lost.
        """
        return sum(self.never_began(hit) and self._seconds_of_deletion(hit) >= KUBELET_SECONDS for hit in self.hits)

    def _seconds_of_deletion(self, hit: Hit) -> float:
        """From the first that was seen of it to the last."""
        versions = [
            change for change in self.scenario.history.of("pods") if change.object["metadata"]["uid"] == hit.pod
        ]
        going = [change.time for change in versions if "deletionTimestamp" in change.object["metadata"]]
        return max(going) - min(going) if going else 0.0

    def last_of(self, hit: Hit) -> Change | None:
        pods = reversed(self.scenario.history.of("pods"))
        return next((change for change in pods if change.object["metadata"]["uid"] == hit.pod), None)

    @property
    def can_be_hit(self) -> bool:
        """Whether what befalls a pod from now on counts for the current attempt. One that was kept from the attempt
        before belongs to that until its launcher has joined this one."""
        if self.spec["restart"].get("scope") == "InPlace":
            return all(self.has_ranks(rank) for rank in range(NODES))
        return len(self.scenario.pods(self.attempt)) == NODES

    def has_ranks(self, node_rank: int) -> bool:
        """Whether a node has processes of the current attempt."""
        report = self.scenario.report(node_rank, self.attempt)
        return bool(report and report["attempt"] == self.attempt and report["ranks"])

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
            args=[
                "--task=paced:Paced",
                f"--task-options=dropout={self.dropout}",
                f"--epochs={steps}",
                f"--max-steps={steps}",
                "--log-every=1",
            ],
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
    sizes = {one["attempt"]: one["nodes"]["total"] for one in job.scenario.statuses if one.get("nodes")}
    alike = sum(1 for _ in itertools.takewhile(lambda line: sizes[line["attempt"]] == NODES, records.losses))
    if records.trajectory[:alike] != whole.trajectory[:alike]:
        wrong.append(f"{job.name}: its losses are not those of the unbroken run")
    if alike == len(records.losses) and records.weights != whole.weights:
        wrong.append(f"{job.name}: its weights are not those of the unbroken run")
    rest = differences(records.trajectory, whole.trajectory)
    if max(rest) > ROUNDING:
        wrong.append(f"{job.name}: with another size, losses are {max(rest):.1e} from those of the unbroken run")
    stored = [change.status for change in job.scenario.history.stored()
              if (change.kind, change.name) == ("ddpjobs", job.scenario.name) and change.type != "DELETED"]  # fmt: skip
    wrong += [f"{job.name}: {rule}" for rule in counters_that_fall(stored)]
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


def differences(one: list[tuple[int, int, float]], other: list[tuple[int, int, float]]) -> list[float]:
    """How far apart two runs are in the loss of each step; infinitely where they did not take the same steps."""
    if [line[:2] for line in one] != [line[:2] for line in other]:
        return [math.inf]
    return [abs(loss - same) for (*_, loss), (*_, same) in zip(one, other, strict=True)]


@contextmanager
def tenants(kubectl: Kubectl, image: str) -> Iterator[tuple[list[Job], list[Job]]]:
    """Three jobs of two tenants, and for each of them one like it that is left alone. What a run that was killed left
    behind goes first.
    """
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
        gang = {"restart": restart}
        elastic = gang | {"placement": {"onePodPerNode": True}, "elastic": ELASTIC}
        jobs = [
            Job(Scenario(*made["one"], image, "gang"), spec=gang),
            Job(Scenario(*made["one"], image, "inplace"), spec={"restart": restart | {"scope": "InPlace"}}),
            Job(Scenario(*made["two"], image, "elastic"), spec=elastic, dropout=0.0),
        ]
        unbroken = Job(Scenario(*made["alone"], image, "gang"))
        without_dropout = Job(Scenario(*made["alone"], image, "elastic"), dropout=0.0)
        yield jobs, [unbroken, unbroken, without_dropout]


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
