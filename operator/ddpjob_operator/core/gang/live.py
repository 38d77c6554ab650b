"""Live recovery (restart.scope Live): pods that are lost while the others train on are replaced within the attempt.

The ranks agree among each other on who takes part. What is left to the operator is to fill the place of each lost pod,
and to see when that does not do: then the attempt is over, and the next one begins in place. A failure counts as a
restart does, so that a pod which fails again and again uses up the budget; a disruption does not.

Which spares take places is decided once, with the loss, and on record before any label is patched. The other places get
new pods, which may have to wait until the names of the lost ones are free. A spare may be given the place of a pod that
still runs on a lost node: of two processes in one place the ranks take in the newer one, and the other one ends.
"""

from __future__ import annotations

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core import transitions
from ddpjob_operator.core.failure.decide import GiveUp, decide
from ddpjob_operator.core.failure.detect import CONSEQUENCES, EXIT_PREEMPTED, LEFT, Failure
from ddpjob_operator.core.gang.members import members, missing
from ddpjob_operator.core.gang.spares import free_spares
from ddpjob_operator.core.manifests.spec_changes import made_otherwise
from ddpjob_operator.core.values.changes import recorded
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import PodView

ENDED = "LiveRecoveryFailed"
"""The reason that a pod gives whose ranks could not go on."""


def is_live(look: Look) -> bool:
    """Whether the ranks of this gang recover by themselves."""
    return look.job.spec.restart.scope == "Live" and look.status.phase is Phase.RUNNING


def obstacle(look: Look, pods: tuple[PodView, ...], failures: tuple[Failure, ...]) -> str | None:
    """Why the others cannot go on without the pods that failed, for people; None if they can.

    How many are enough is for the ranks to judge: fewer than `elastic.minNodes` wait for the replacement, and end with
    a reason of their own where it does not come.
    """
    lost = {failure.node_rank for failure in failures}
    if None in lost:
        return "a failure is of no pod of the gang"
    if made_otherwise(look.job, look.status, look.defaults):
        return "a new pod would not be like the others, since the spec or the operator's defaults have changed"
    if not any(pod.node_rank not in lost and pod.running and not pod.deleting for pod in pods):
        return "no other pod of the gang runs"
    for failure in failures:
        if failure.fenced_by is not None:
            return f"the volume knows attempt {failure.fenced_by}"
        if failure.reason == ENDED:
            return "the ranks gave it up"
        has_left = failure.report is not None and failure.report.reason == LEFT
        if failure.exit_code == EXIT_PREEMPTED and not has_left:  # too few are left: all have saved, and stop
            return "all ranks were asked to stop"
        if failure.reason in CONSEQUENCES and not failure.outside:
            return f"the ranks of pod {failure.pod_name} did not go on ({failure.reason})"
        if isinstance(decided := decide(look, failure), GiveUp):
            return f"the job fails ({decided.reason})"
    return None


def without_lost(look: Look, pods: tuple[PodView, ...], failures: tuple[Failure, ...]) -> Look:
    """The look with the pods that failed on record as lost, and to be replaced: one recovery.

    Spares take their places, the lowest node ranks first. One that ends before it has its place is no other loss.
    """
    look = look.with_status(recorded(look.status, live_recoveries=(look.status.live_recoveries or 0) + 1))
    gone = {f"missing-{rank}": rank for _, rank in missing(look)}
    lost = {failure.node_rank for failure in failures}
    uids = {pod.uid: pod.node_rank for pod in pods if pod.node_rank in lost and pod.node_rank is not None}
    known = look.status.internal
    ranks = sorted({*gone.values(), *uids.values()})
    places = dict(zip((pod.name for pod in free_spares(look)), ranks, strict=False))
    kept = {name: rank for name, rank in known.kept_pods.items() if rank not in ranks}
    return transitions.replace_lost(look, known.lost_pods | gone | uids, kept | places)


def in_their_place(before: Look, after: Look) -> str:
    """How the pods are replaced that `after` has on record as lost and `before` has not, for people."""
    known, now = before.status.internal, after.status.internal
    taken = {name: rank for name, rank in now.kept_pods.items() if known.kept_pods.get(name) != rank}
    lost = {rank for uid, rank in now.lost_pods.items() if uid not in known.lost_pods}
    if not taken:
        return "the pods are replaced" if len(lost) > 1 else "the pod is replaced"
    each = ", ".join(f"spare {name} takes the place of node rank {rank}" for name, rank in taken.items())
    rest = len(lost) - len(taken)
    return f"{each}, and {rest} {'pod is' if rest == 1 else 'pods are'} created" if rest > 0 else each


def without_replaced(look: Look) -> Look:
    """The look in which a lost pod is forgotten once it is gone and its replacement runs."""
    lost = look.status.internal.lost_pods
    if not lost:
        return look
    there = {pod.uid for pod in look.observed.pods}
    run = {pod.node_rank for pod in members(look) if pod.running}
    left = {uid: rank for uid, rank in lost.items() if uid in there or rank not in run}
    return look if left == lost else transitions.replace_lost(look, left)
