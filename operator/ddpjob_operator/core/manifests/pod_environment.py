"""What a pod tells its launcher: arguments and environment, as docs/contracts.md sections 1 and 2 state them."""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob_operator.api.pod import EnvVar
from ddpjob_operator.api.spec import BUILT_IN_MODULE, SHUTDOWN_SECONDS
from ddpjob_operator.core.manifests.code import code_variables
from ddpjob_operator.core.values.job import Job, Manifest
from ddpjob_operator.core.values.names import SPARE
from ddpjob_operator.core.values.observed import ServiceView

SHARED_PATH = "/mnt/shared"
STATUS_PORT = 9400
RENDEZVOUS_PORT = 29500
RUN_DIR = "/dev/shm/ddpjob"  # noqa: S108 - an emptyDir of this pod alone
SCRATCH = "/tmp"  # noqa: S108 - an emptyDir of this pod alone
TERMINATION_LOG = "/dev/termination-log"
ASSIGNMENT_DIR = "/etc/ddpjob/assignment"
"""Where a pod whose place in the gang may change reads it: files attempt, node-rank and nodes."""

REASSIGN_SECONDS = 300
"""How long such a pod waits for its place in the next attempt, as the launcher has it by default."""
NOTICED_SECONDS = 120
"""Until that attempt begins, its backoff left out: a gang that is stranded is noticed after a minute."""
LONGEST_REASSIGN_SECONDS = 900
"""Where pods cannot be asked, their end is the only sign of a stranded gang. Few backoffs are ever longer."""


@dataclass(frozen=True, slots=True)
class Place:
    """A pod's place in a gang."""

    attempt: int
    node_rank: int | None
    """None for a spare."""
    service: ServiceView
    name: str | None = None
    """Its own name, where that is not the one of its attempt and node rank."""
    nodes: int | None = None
    """Size of the gang in this attempt; None for the spec's."""
    avoid: tuple[str, ...] = ()
    """Nodes to keep away from."""
    group: str = ""
    """The group that it joins; empty for its attempt's own."""


def launch_args(job: Job) -> list[str]:
    """Arguments of the launcher: what to run, and the user's own after `--`, safe from Kubernetes' `$(NAME)`
    expansion.
    """
    entrypoint = job.spec.entrypoint
    if entrypoint.script is not None:
        start = ["--script", entrypoint.script]
    else:
        start = ["--module", entrypoint.module or BUILT_IN_MODULE]
    return [*start, "--", *(literal(argument) for argument in job.spec.args)]


def is_assignable(job: Job) -> bool:
    """Whether a pod's place in the gang may change while it runs.

    The launcher then reads it from the pod's labels, through a volume that the kubelet keeps up to date; the
    environment has only what the place was when the pod was made.
    """
    return job.spec.restart.scope != "Gang" or job.spec.spares > 0 or job.spec.elastic is not None


def environment(job: Job, place: Place) -> list[Manifest]:
    """The contract's variables first, so that a user's valueFrom cannot refer to something later, then the
    user's own.
    """
    node_rank, service = place.node_rank, place.service
    own = {
        "DDPJOB_NAME": job.name,
        "DDPJOB_NAMESPACE": job.namespace,
        "DDPJOB_UID": job.uid,
        "DDPJOB_CREATED": str(int(job.created.timestamp())),
        "DDPJOB_ATTEMPT": str(place.attempt),
        "DDPJOB_NODE_RANK": SPARE if node_rank is None else str(node_rank),
        "DDPJOB_NODES": str(place.nodes or job.spec.nodes),
        "DDPJOB_PROCS_PER_NODE": str(job.spec.ranks_per_node),
        "DDPJOB_RDZV_HOST": service.host,
        "DDPJOB_RDZV_PORT": str(service.port),
        "DDPJOB_STATUS_PORT": str(STATUS_PORT),
        "DDPJOB_SHARED": SHARED_PATH,
        "DDPJOB_RUN_DIR": RUN_DIR,
        "DDPJOB_SCRATCH": SCRATCH,
        "DDPJOB_TERMINATION_LOG": TERMINATION_LOG,
        "DDPJOB_KEEP_OUTPUT": "true",
        "DDPJOB_SNAPSHOT_EVERY": job.spec.snapshots.every,
        "DDPJOB_SNAPSHOT_KEEP": str(job.spec.snapshots.keep),
        "DDPJOB_STALL_MIN_SECONDS": str(job.spec.stall.min_seconds),
        "DDPJOB_STALL_MAX_SECONDS": str(job.spec.stall.max_seconds),
    }
    if job.spec.shutdown_limit != SHUTDOWN_SECONDS:
        own["DDPJOB_SHUTDOWN_SECONDS"] = str(job.spec.shutdown_limit)
    if job.spec.snapshots.keep_every is not None:
        own["DDPJOB_SNAPSHOT_KEEP_EVERY"] = str(job.spec.snapshots.keep_every)
    if job.spec.snapshots.resume != "Any":
        own["DDPJOB_SNAPSHOT_RESUME"] = job.spec.snapshots.resume
    if job.spec.non_finite_loss_policy != "Warn":
        own["DDPJOB_NON_FINITE_LOSS"] = job.spec.non_finite_loss_policy
    if job.spec.code is not None:
        own |= {name: literal(value) for name, value in code_variables(job.spec.code).items()}
    if job.spec.elastic is not None:
        own["DDPJOB_ELASTIC_MIN_NODES"] = str(job.spec.elastic.min_nodes)
    if not job.spec.observe_script:
        own["DDPJOB_OBSERVE_SCRIPT"] = "false"
    if job.spec.restart.scope == "Live":
        own["DDPJOB_LIVE"] = "true"
    if is_assignable(job):
        own["DDPJOB_ASSIGNMENT_DIR"] = ASSIGNMENT_DIR
        longest = min(LONGEST_REASSIGN_SECONDS, job.spec.restart.backoff.max_seconds + NOTICED_SECONDS)
        if longest > REASSIGN_SECONDS:
            own["DDPJOB_REASSIGN_SECONDS"] = str(longest)
    downward = {
        "DDPJOB_POD_NAME": "metadata.name",
        "DDPJOB_NODE_NAME": "spec.nodeName",
        "POD_IP": "status.podIP",
    }
    convenience = {"HOME": SCRATCH, "PYTHONUNBUFFERED": "1"}  # writable although the root is read-only
    users = {variable.name for variable in job.spec.env}
    return [
        *({"name": name, "value": value} for name, value in own.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in downward.items()),
        *({"name": name, "value": value} for name, value in convenience.items() if name not in users),
        *(env_var(variable) for variable in job.spec.env),
    ]


def env_var(variable: EnvVar) -> Manifest:
    """A variable of the user's, taken literally."""
    if variable.value_from is not None:
        return {"name": variable.name, "valueFrom": variable.value_from}
    return {"name": variable.name, "value": literal(variable.value or "")}


def literal(text: str) -> str:
    """As Kubernetes hands it on unchanged: it reads every `$$` as `$`, not only before a parenthesis."""
    return text.replace("$", "$$")
