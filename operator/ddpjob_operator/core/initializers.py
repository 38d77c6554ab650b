"""Data before the gang: one pod that runs the job's initializers in order, once for the life of the job.

A gang of GPUs must not wait for a download, and must not download the same thing once a node. So nothing of the gang
is made before the condition Initialized holds. A try that fails is counted in the status before its pod is deleted,
and is repeated after the backoff of a restart, under another name; what it had finished it finds on the volume.

Every initializer is a container of its own, so that its credentials are nobody else's: init containers run one after
the other (Kubernetes), the last one is the pod's main container.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta

from ddpjob_operator.api.pod import Initializer
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core import conditions as cond
from ddpjob_operator.core.actions import Action, CreateChild, DeletePod, Event, Plan, soonest
from ddpjob_operator.core.bounds import ALWAYS_USED, with_default_resources
from ddpjob_operator.core.budget import backoff_seconds
from ddpjob_operator.core.failures import EXIT_USER, SETTLE_SECONDS, Failure, Retry
from ddpjob_operator.core.gang import awaits_data
from ddpjob_operator.core.lost import is_lost, until_lost
from ddpjob_operator.core.merge import merge
from ddpjob_operator.core.model import Defaults, InitializerView, Job, Manifest, Observed, PodPhase, PodView
from ddpjob_operator.core.names import INITIALIZER, LABEL_ATTEMPT, LABEL_ROLE, initializer_name, job_labels
from ddpjob_operator.core.phases import degraded, plan_failed
from ddpjob_operator.core.pod_environment import SHARED_PATH, TERMINATION_LOG, env_var, literal
from ddpjob_operator.core.pods import (
    owner_reference,
    restricted_container,
    restricted_context,
    shared_volume,
    users_labels,
)
from ddpjob_operator.core.progress import failure_status
from ddpjob_operator.core.report import read_termination
from ddpjob_operator.core.trouble import TROUBLE_GRACE_SECONDS, find_trouble, is_degraded
from ddpjob_operator.core.unexplained import ask, until_asked

RETRIES = 3
"""Tries after the first one that failed."""

SOURCES_PATH = "/mnt/source"
"""Where claims that data is copied from are mounted, each under its name."""

FAILED = "InitializerFailed"
_GRACE_SECONDS = 2
_OF_THE_GANG = ("containers", "initContainers", "affinity", "topologySpreadConstraints", "schedulingGates")
"""What the podTemplate says of the pods that train, and of no other."""


def plan_initializers(
    job: Job, observed: Observed, status: DDPJobStatus, now: datetime, defaults: Defaults
) -> tuple[DDPJobStatus, Plan | None]:
    """Run the initializers. With None the gang may be made, and the status says so."""
    if not awaits_data(job, status):
        return status, None
    status = status.model_copy(update={"phase": status.phase or Phase.PENDING, "start_time": status.start_time or now})
    pod = observed.initializer
    if pod is not None and pod.number > status.initializer_failures:
        status = status.model_copy(update={"initializer_failures": pod.number})  # the status was lost
    if pod is None or pod.number < status.initializer_failures:
        return status, _begin(job, observed, status, pod, now, defaults)
    if pod.succeeded:
        many = f"{len(job.spec.initializers)} initializers have" if len(job.spec.initializers) > 1 else "it has"
        return _said(job, status, True, "DataReady", f"{many} put their data on the volume", now), None
    if pod.deleting and (left := _grace_left(pod, now)) > 0:
        return status, Plan(status, requeue_after=left)  # its end comes as an event, unless its node is gone
    if pod.ended or pod.deleting or is_lost(_as_pod(pod, status), job.spec.restart, now):
        return status, _after_failure(job, observed, status, pod, now)
    return status, _waiting(job, observed, status, pod, now)


def _begin(
    job: Job, observed: Observed, status: DDPJobStatus, old: InitializerView | None, now: datetime, defaults: Defaults
) -> Plan:
    stale: tuple[Action, ...] = ()
    if old is not None and not old.deleting:
        stale = (DeletePod(old.name, old.uid, _GRACE_SECONDS),)
    wait = (status.retry_at - now).total_seconds() if status.retry_at is not None else 0.0
    if 0 < wait <= max(job.spec.restart.backoff.max_seconds, _GRACE_SECONDS):  # more: the clock was set back
        return Plan(status, stale, requeue_after=wait)
    if observed.problem is not None:
        status = degraded(job, status, observed.problem.reason, observed.problem.message, now)
    pod = build_initializer(job, status.initializer_failures, defaults)
    # that a suspension is over must be on record before there is a pod again that it would stop
    resumed = cond.find(status.conditions, cond.SUSPENDED) != cond.find(job.status.conditions, cond.SUSPENDED)
    return Plan(status, (*stale, CreateChild(pod)), status_first=resumed)


def _waiting(job: Job, observed: Observed, status: DDPJobStatus, pod: InitializerView, now: datetime) -> Plan:
    names = ", ".join(item.name for item in job.spec.initializers)
    after = _said(job, status, False, "Initializing", f"pod {pod.name} puts data on the volume: {names}", now)
    events: tuple[Event, ...] = ()
    if cond.find(status.conditions, cond.INITIALIZED) is None:
        events = (Event("Normal", "Initializing", f"fetching data before training: {names}"),)
    pods = (_as_pod(pod, status),)
    trouble = find_trouble(after, pods, observed.problem, now, observed.warnings)
    if trouble is not None and is_degraded(trouble):
        after = degraded(job, after, trouble.reason, trouble.message, now)
    else:
        conditions = cond.set_condition(
            after.conditions, cond.DEGRADED, False, "AsExpected", "", now=now, generation=job.generation
        )
        after = after.model_copy(update={"conditions": conditions})
    look = soonest(
        TROUBLE_GRACE_SECONDS if pod.phase is PodPhase.PENDING else None,
        until_asked(after, pods, observed.warnings, now),
        until_lost(pods, job.spec.restart, now),
    )
    return Plan(after, ask(after, pods, observed.warnings, now), requeue_after=look, events=events)


def _after_failure(job: Job, observed: Observed, status: DDPJobStatus, pod: InitializerView, now: datetime) -> Plan:
    cause, final = _cause(pod)
    status = status.model_copy(update={"initializer_failures": pod.number + 1})
    if final or pod.number >= RETRIES:
        said = cause if final else f"{cause}; it was tried {pod.number + 1} times"
        status = _said(job, status, False, FAILED, said, now)
        code = pod.termination.exit_code if pod.termination else None
        failure = Failure(FAILED, said, Retry.NEVER, pod_name=pod.name, exit_code=code)
        status = status.model_copy(update={"last_failure": failure_status(status, failure, now)})
        return plan_failed(job, observed, status, FAILED, said, now)
    delay = backoff_seconds(job.spec.restart.backoff, pod.number, f"{job.uid}/init-{pod.number}")
    again = f"{cause}; trying again in {delay:.0f} s ({pod.number + 1} of {RETRIES} times)"
    after = _said(job, status, False, FAILED, again, now)
    return Plan(
        after.model_copy(update={"retry_at": now + timedelta(seconds=delay)}),
        (DeletePod(pod.name, pod.uid, _GRACE_SECONDS),),
        status_first=True,
        requeue_after=delay,
        events=(Event("Warning", FAILED, again.splitlines()[0]),),
    )


def _cause(pod: InitializerView) -> tuple[str, bool]:
    """What went wrong, for people, and whether another try would only do the same."""
    ended = pod.termination
    who = f"initializer {pod.step}" if pod.step else f"pod {pod.name}"
    if ended is None:
        return f"{who}: {pod.message or pod.reason or f'its node {pod.node_name} went away'}", False
    said = read_termination(ended.message)
    told = said.message if said else ""
    how = f"ended with exit code {ended.exit_code}" + (f" ({ended.reason})" if ended.reason else "")
    return f"{who}: {told or how}", ended.exit_code == EXIT_USER


def _said(job: Job, status: DDPJobStatus, holds: bool, reason: str, message: str, now: datetime) -> DDPJobStatus:
    conditions = cond.set_condition(
        status.conditions, cond.INITIALIZED, holds, reason, message, now=now, generation=job.generation, say_false=True
    )
    return status.model_copy(update={"conditions": conditions})


def _grace_left(pod: InitializerView, now: datetime) -> float:
    """Seconds in which the end of a pod that is being deleted may still be confirmed."""
    gone_by = pod.gone_by or now
    return SETTLE_SECONDS - (now - gone_by).total_seconds()


def _as_pod(pod: InitializerView, status: DDPJobStatus) -> PodView:
    return PodView(
        name=pod.name,
        uid=pod.uid,
        attempt=status.attempt,
        node_rank=None,
        phase=pod.phase,
        scheduled=pod.scheduled,
        node_name=pod.node_name,
        not_ready_since=pod.not_ready_since,
        reason=pod.reason,
        message=pod.message,
        exited=pod.exited,
    )


def build_initializer(job: Job, number: int, defaults: Defaults) -> Manifest:
    """The pod that runs the initializers for the nth time, from 0."""
    template = job.spec.pod_template
    metadata, user_spec = template.metadata if template else None, (template.spec if template else None) or {}
    claims = sorted({claim for item in job.spec.initializers if (claim := source_claim(item)) is not None})
    volumes = {claim: f"source-{index}" for index, claim in enumerate(claims)}
    *first, last = [_container(job, item, defaults, volumes) for item in job.spec.initializers]
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 10,
        "securityContext": restricted_context(),
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    spec = merge(spec, {name: value for name, value in user_spec.items() if name not in _OF_THE_GANG})
    sources = [
        {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        for claim, name in volumes.items()
    ]
    spec = merge(spec, {"restartPolicy": "Never", "containers": [last], "volumes": [shared_volume(job), *sources]})
    if first:
        spec["initContainers"] = first
    own = job_labels(job.name, job.uid) | {LABEL_ROLE: INITIALIZER, LABEL_ATTEMPT: str(number)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": initializer_name(job.name, number),
            "namespace": job.namespace,
            "labels": users_labels(template) | own,
            "annotations": (metadata.annotations if metadata else None) or {},
            "ownerReferences": [owner_reference(job)],
        },
        "spec": spec,
    }


def source_claim(item: Initializer) -> str | None:
    """The claim that `pvc://claim/path` names."""
    kind, _, rest = (item.source or "").partition("://")
    return rest.partition("/")[0] if kind == "pvc" else None


def _container(job: Job, item: Initializer, defaults: Defaults, volumes: dict[str, str]) -> Manifest:
    task = item.model_dump(by_alias=True, exclude_none=True, exclude={"env"})
    own = {
        "DDPJOB_INITIALIZER": literal(json.dumps(task)),
        "DDPJOB_SHARED": SHARED_PATH,
        "DDPJOB_SOURCES": SOURCES_PATH,
        "DDPJOB_TERMINATION_LOG": TERMINATION_LOG,
    }
    users = [variable for variable in item.env if variable.name not in own]
    if not any(variable.name == "HOME" for variable in users):
        own["HOME"] = "/tmp"  # noqa: S108 - writable although the root is read-only
    mounts: list[Manifest] = [
        {"name": "shared", "mountPath": SHARED_PATH},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a mount of the pod
    ]
    if (claim := source_claim(item)) is not None:
        mounts.append({"name": volumes[claim], "mountPath": f"{SOURCES_PATH}/{claim}", "readOnly": True})
    container: Manifest = {
        "name": item.name,
        "image": job.spec.image or defaults.trainer_image,
        "command": ["python", "-m", "ddp_trainer.initialize"],
        "env": [*map(env_var, users), *({"name": name, "value": value} for name, value in own.items())],
        "securityContext": restricted_container(),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "volumeMounts": mounts,
    }
    return with_default_resources(with_default_resources(container, defaults.resources), _bounded(defaults))


def _bounded(defaults: Defaults) -> dict[str, dict[str, str]]:
    """What an initializer has where nobody says it: as much as a pod may use, and nothing reserved."""
    bounds = {name: most for name, most in defaults.bounds.resources.items() if name in ALWAYS_USED}
    return {"limits": bounds, "requests": dict.fromkeys(bounds, "0")} if bounds else {}
