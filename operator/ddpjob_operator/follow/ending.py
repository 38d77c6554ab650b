"""What becomes of a job that is deleted: of its pods, its snapshots and its volume, in words."""

from __future__ import annotations

from ddpjob_operator.api.spec import BUILT_IN_MODULE
from ddpjob_operator.core.values.names import pvc_name
from ddpjob_operator.local.observed import snapshot_in_words
from ddpjob_operator.wire.jobs import parse_status
from ddpjob_operator.wire.objects import Object


def loses_its_volume(job: Object) -> bool:
    """Whether the claim is deleted with the job: the operator made it, and is not to retain it."""
    shared = (job.get("spec") or {}).get("shared") or {}
    return not shared.get("claimName") and shared.get("retain") is False


def pods_in_words(job: Object) -> str:
    """What its pods do when the job is deleted."""
    nodes = parse_status(job.get("status") or {}).nodes
    if not nodes.ready:
        return "it has no pod that trains"
    count = "its pod saves" if nodes.ready == 1 else f"its {nodes.ready} pods save"
    ends = "ends" if nodes.ready == 1 else "end"
    entrypoint = (job.get("spec") or {}).get("entrypoint") or {}
    if entrypoint.get("script") or entrypoint.get("module") not in (None, BUILT_IN_MODULE):
        return f"{count} a snapshot, if the script makes snapshots, and {ends}"
    return f"{count} a snapshot and {ends}"


def cancelled_in_words(job: Object, *, kept: bool) -> tuple[str, ...]:
    """What was done, what is kept, and how to resume or remove it."""
    name, shared = job["metadata"]["name"], (job.get("spec") or {}).get("shared") or {}
    done = f"{name} is cancelled: {pods_in_words(job)}"
    if loses_its_volume(job) and not kept:
        return (done, f"deleted with it: claim {pvc_name(name)} (spec.shared.retain: false)")
    claim = shared.get("claimName") or pvc_name(name)
    snapshot = parse_status(job.get("status") or {}).snapshot
    newest = f"; so far the newest is the {snapshot_in_words(snapshot)}" if snapshot is not None else ""
    lines = (done, f"kept: claim {claim}, with snapshots and logs{newest}")
    own = ((job.get("spec") or {}).get("snapshots") or {}).get("resume") == "Own"
    change = " with spec.snapshots.resume: Any" if own else ""
    resume = f"to resume, apply the job again under the same name{change}"
    if shared.get("claimName"):
        return (*lines, resume)
    return (*lines, f"{resume}; to give up its files, kubectl delete pvc {claim}")
