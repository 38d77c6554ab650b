"""One job in a namespace of its own: how a test applies it, hits it and reads what it left on its volume.

Numbers that decide a test come from the trainer's own records on the volume (docs/contracts.md section 6). They are
read inside the cluster, so that nothing depends on where a volume really is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.cluster.asking import asked
from tests.cluster.history import ATTEMPT, JOB, NODE_RANK, History
from tests.cluster.kube import Kubectl, Object, describe
from tests.support.waiting import CLUSTER_SECONDS, eventually

NODES = 2
EPOCHS = 6
STEPS = EPOCHS * 23
"""1,437 digits in batches of 64 are 23 steps an epoch."""
SMALL = ("--task-options=width=8", "--lr=0.003")
"""A quarter of the channels, and a rate at which so few steps are enough to learn."""

SNAPSHOT_STEPS = 20

READ_VOLUME = """
import hashlib, json, pathlib, sys
from ddp_trainer.logs.losses import read_losses
from safetensors import deserialize
shared, job = pathlib.Path("/mnt/shared"), sys.argv[1]
def lines(name):
    file = shared / "logs" / job / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
def weights(folder):
    digest = hashlib.sha256()
    for name, tensor in sorted(deserialize((folder / "model.safetensors").read_bytes())):
        digest.update(f"{name} {tensor['dtype']} {tensor['shape']}".encode() + bytes(tensor["data"]))
    return digest.hexdigest()
snapshots = [
    json.loads((folder / "manifest.json").read_text()) | {"weights": weights(folder)}
    for folder in sorted((shared / "checkpoints" / job).glob("step-*[0-9]"))
]
losses = read_losses(shared / "logs" / job)
print(json.dumps({"losses": losses, "events": lines("events.jsonl"), "snapshots": snapshots}))
"""

STEP_SECONDS = 0.12
"""Enough to hit a job once, on any machine."""

SEVERAL_HITS = 0.3
"""The same for one that is hit again and again, with a third of its steps for each."""

PACED = """
import time
from ddp_trainer.tasks.digits import Digits

class Paced(Digits):
    def loss(self, output, batch):
        if output.requires_grad:
            time.sleep(STEP_SECONDS)
        return super().loss(output, batch)
"""

KILL = "import os, sys, time; print(time.time()); os.kill(int(sys.argv[1]), int(sys.argv[2]))"


def digits_job(name: str = "digits", **spec: Any) -> Object:
    """Two nodes that train on handwritten digits for some seconds and keep every snapshot. `spec` wins."""
    return {
        "apiVersion": "training.ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": {
            "args": ["--task=digits", f"--epochs={EPOCHS}", *SMALL],
            "nodes": NODES,
            # nodes of a test cluster share the cores of one machine, and threads of two gangs would wait on each other
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            "snapshots": {"every": f"{SNAPSHOT_STEPS}steps", "keep": 1000},
        }
        | spec,
    }


@dataclass(frozen=True, slots=True)
class Records:
    """What a run wrote on its volume. A snapshot is its manifest and `weights`, a digest of the model's tensors."""

    losses: list[dict[str, Any]]
    events: list[dict[str, Any]]
    snapshots: dict[int, dict[str, Any]]

    @property
    def trajectory(self) -> list[tuple[int, int, float]]:
        """(step, epoch, loss) of every step: what must not depend on how often the run was broken."""
        return [(line["step"], line["epoch"], line["loss"]) for line in self.losses]

    @property
    def weights(self) -> str:
        """Digest of the final weights."""
        return str(self.snapshots[max(self.snapshots)]["weights"])

    def event(self, name: str, attempt: int) -> dict[str, Any] | None:
        return next((e for e in self.events if e["event"] == name and e["attempt"] == attempt), None)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job in a namespace that is recorded from its beginning."""

    kubectl: Kubectl
    history: History
    trainer_image: str
    name: str = "digits"

    def apply(self, **spec: Any) -> None:
        self.kubectl.apply(digits_job(self.name, **spec))

    def train(self, epochs: int = EPOCHS, step_seconds: float = STEP_SECONDS, **spec: Any) -> None:
        """The same steps as those of `apply`, each of which takes so long; meanwhile its ranks leave the cores to other
        tests.
        """
        data = {"paced.py": PACED.replace("STEP_SECONDS", str(step_seconds))}
        self.kubectl.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "paced"}, "data": data})
        template = {
            "volumes": [{"name": "paced", "configMap": {"name": "paced"}}],
            "containers": [{"name": "trainer", "volumeMounts": [{"name": "paced", "mountPath": "/opt/paced"}]}],
        }
        spec["podTemplate"] = {"spec": template | spec.get("podTemplate", {}).get("spec", {})}
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "/opt/paced"}
        self.apply(
            args=["--task=paced:Paced", f"--epochs={epochs}", *SMALL],
            env=[{"name": name, "value": value} for name, value in env.items()],
            **spec,
        )

    @property
    def job(self) -> Object:
        job = self.history.latest("ddpjobs", self.name)
        assert job is not None, f"ddpjob {self.name} is gone"
        return job

    @property
    def status(self) -> dict[str, Any]:
        return (self.history.latest("ddpjobs", self.name) or {}).get("status") or {}

    @property
    def statuses(self) -> list[dict[str, Any]]:
        """Every status that the job ever had, oldest first."""
        return [change.status for change in self.history.of("ddpjobs", self.name) if change.type != "DELETED"]

    def wait_phase(self, phase: str, seconds: float = CLUSTER_SECONDS) -> dict[str, Any]:
        """The job's status once it is in `phase`; fails at once if it ends in another."""

        def reached() -> dict[str, Any] | None:
            status = self.status
            now = status.get("phase")
            if now in ("Succeeded", "Failed") and now != phase:
                raise AssertionError(f"the job became {now}, not {phase}\n{describe(self.kubectl)}")
            return status if now == phase else None

        return self.history.wait(reached, f"the job is {phase}", seconds)

    def pod(self, node_rank: int, attempt: int) -> Object | None:
        """One node of the gang, as it is now."""
        for pod in self.history.present("pods"):
            labels = pod["metadata"].get("labels") or {}
            place = (labels.get(JOB), labels.get(NODE_RANK), labels.get(ATTEMPT))
            if place == (self.name, str(node_rank), str(attempt)):
                return pod
        return None

    def pods(self, attempt: int) -> list[Object]:
        return [pod for rank in range(NODES) if (pod := self.pod(rank, attempt))]

    def pod_name(self, node_rank: int, attempt: int) -> str:
        """The name of one node of the gang, which may be a pod that was made for an earlier attempt."""
        pod = self.pod(node_rank, attempt)
        return pod["metadata"]["name"] if pod else f"{self.name}-{attempt}-{node_rank}"

    def report(self, node_rank: int = 0, attempt: int = 0) -> dict[str, Any] | None:
        """What the trainer says of itself (docs/contracts.md section 4), or None while it does not answer."""
        pod = self.pod_name(node_rank, attempt)
        path = f"/api/v1/namespaces/{self.kubectl.namespace}/pods/{pod}:9400/proxy/status"
        return asked(self.kubectl.kubeconfig, path)

    def wait_trained(self, step: int, attempt: int = 0, seconds: float = CLUSTER_SECONDS) -> dict[str, Any]:
        """Node rank 0's report once training is past `step` and has saved a snapshot."""

        report: dict[str, Any] | None = None

        def past() -> dict[str, Any] | None:
            nonlocal report
            phase = self.status.get("phase")
            assert phase not in ("Succeeded", "Failed"), f"{phase} before it could be hit; last report: {report}"
            report = self.report(0, attempt)
            return report if report and (report["step"] or 0) >= step and report["snapshot"] else None

        return eventually(past, f"attempt {attempt} is past step {step}", seconds, lambda: describe(self.kubectl))

    def kill_rank(self, rank: int, signal: int = 9, attempt: int = 0) -> float:
        """Send a signal to the process of one rank, from inside its container; when, in seconds since the epoch."""

        def answers() -> dict[str, Any] | None:
            phase = self.status.get("phase")
            assert phase not in ("Succeeded", "Failed"), f"{phase} before node rank {rank} could be hit"
            report = self.report(rank, attempt)
            return report if report and report["ranks"] and report["ranks"][0]["pid"] else None

        # a kubelet that shares its cores may not pass a question on in time
        report = eventually(answers, f"node rank {rank} of attempt {attempt} answers", CLUSTER_SECONDS)
        pod, pid = self.pod_name(rank, attempt), report["ranks"][0]["pid"]
        return float(self.kubectl.python(pod, KILL, str(pid), str(signal), container="trainer"))

    def delete_pod(self, node_rank: int, *options: str, attempt: int = 0) -> None:
        self.kubectl.delete("pod", self.pod_name(node_rank, attempt), *options)

    @property
    def reader(self) -> str:
        """Name of the pod that reads the job's volume, once `records` was called."""
        return f"{self.name}-reader"

    def records(self) -> Records:
        """What is on the job's volume now."""
        if self.history.latest("pods", self.reader) is None:
            self.kubectl.apply(reader_pod(self.reader, f"{self.name}-shared", self.trainer_image))
        self.history.wait(self._reader_runs, "the pod that reads the volume runs")
        read = json.loads(self.kubectl.python(self.reader, READ_VOLUME, self.name))
        return Records(read["losses"], read["events"], {shot["step"]: shot for shot in read["snapshots"]})

    def _reader_runs(self) -> bool:
        pod = self.history.latest("pods", self.reader)
        return bool(pod and (pod["status"].get("containerStatuses") or [{}])[0].get("ready"))


def reader_pod(name: str, claim: str, image: str) -> Object:
    """A pod that does nothing, within the restricted Pod Security profile, with the volume at /mnt/shared."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "fsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "reader",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python", "-c", "import signal; signal.pause()"],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "shared", "mountPath": "/mnt/shared"}],
                }
            ],
            "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }
