"""Jobs, pods and endings for the tables of these tests: short to write, and real values of the model."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob_operator.api.immutable import immutable_digests
from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus, Internal, NodeCount, Phase
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.observed import Observed, PodPhase, PodView, ServiceView, Termination
from ddpjob_operator.core.values.trainer_report import TrainerReport, read_status

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
UID = "0b0c0d0e-0000-4000-8000-000000000001"
DEFAULTS = Defaults(trainer_image="registry.example/trainer:1")


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def make_job(status: DDPJobStatus | None = None, *, deleting: bool = False, generation: int = 1, **spec: Any) -> Job:
    """The job `digits`; keyword arguments are fields of its spec as they stand in YAML. Two nodes by default."""
    return Job(
        name="digits",
        namespace="research",
        uid=UID,
        generation=generation,
        created=NOW - timedelta(minutes=5),
        spec=DDPJobSpec.model_validate({"nodes": 2, **spec}),
        status=status or DDPJobStatus(),
        deleting=deleting,
    )


def in_phase(phase: Phase, *, nodes: int = 2, spec: dict[str, Any] | None = None, **fields: Any) -> DDPJobStatus:
    """The status of the job of `make_job` in one phase, as the operator would have written it."""
    digests = immutable_digests(DDPJobSpec.model_validate({"nodes": nodes, **(spec or {})}))
    notes = {name: fields.pop(name) for name in tuple(fields) if name in Internal.model_fields}
    internal = Internal(**{"spec_digests": digests} | notes)
    return DDPJobStatus(
        phase=phase,
        start_time=NOW - timedelta(minutes=4),
        nodes=NodeCount(ready=0, total=nodes),
        observed_generation=1,
        internal=internal,
    ).model_copy(update=fields)


def make_pod(node_rank: int = 0, phase: str = "Running", attempt: int = 0, **fields: Any) -> PodView:
    return PodView(
        name=f"digits-{attempt}-{node_rank}",
        uid=f"pod-{attempt}-{node_rank}",
        attempt=attempt,
        node_rank=node_rank,
        phase=PodPhase(phase),
        node_name=f"node-{node_rank}",
        **fields,
    )


def make_report(reason: str = "WorkerException", **fields: Any) -> str:
    """A termination message (docs/contracts.md section 5)."""
    return json.dumps({"version": 1, "outcome": "Failed", "reason": reason, "message": f"it was {reason}"} | fields)


def heard(**fields: Any) -> TrainerReport:
    """What node rank 0 answers to `/status` (docs/contracts.md section 4), as it comes over the wire."""
    report = read_status(json.dumps({"version": 1, "uid": UID, "attempt": 0} | fields))
    assert report is not None
    return report


def ended(exit_code: int, message: str = "", *, ago: float | None = 60.0, **fields: Any) -> Termination:
    """How a trainer container ended, `ago` seconds before NOW (None: nobody knows when)."""
    return Termination(exit_code, message=message, finished_at=None if ago is None else later(-ago), **fields)


def failed(node_rank: int, exit_code: int, reported: str = "", *, ago: float | None = 60.0, **fields: Any) -> PodView:
    """A pod whose trainer failed; `reported` is the reason in its termination message, if there is one."""
    message = make_report(reported, time=None if ago is None else later(-ago).timestamp()) if reported else ""
    return make_pod(node_rank, "Failed", termination=ended(exit_code, message, ago=ago), **fields)


def succeeded(node_rank: int, **fields: Any) -> PodView:
    message = make_report("Completed", outcome="Succeeded", step=400, metrics={"eval_accuracy": 0.97})
    return make_pod(node_rank, "Succeeded", termination=ended(0, message), **fields)


def seen(*pods: PodView, attempt: int | None = 0, **fields: Any) -> Observed:
    """Pods whose logs were read, a claim, and a Service that selects `attempt` (None: no Service is known)."""
    service = None if attempt is None else ServiceView("10.96.0.7", attempt)
    logs = {pod.uid: "" for pod in pods}
    return Observed(**{"pods": pods, "service": service, "pvc_exists": True, "logs": logs} | fields)
