"""Starting and Restarting: complete the gang of the current attempt, after the data is there.

Pods that are missing are created or reassigned, those of older attempts deleted. The attempt that cannot be completed
gets another size (`gang.elastic`), or gives back what it holds (`all_or_nothing`). Once all pods run the job does.
"""

from __future__ import annotations

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core import transitions
from ddpjob_operator.core.failure.node_exclusion import dated, forgiven, until_forgiven
from ddpjob_operator.core.failure.node_lost import patience, unresponsive_nodes, until_forced, until_lost
from ddpjob_operator.core.gang.children import create_service, missing_children, old_groups
from ddpjob_operator.core.gang.elastic import grace_of_old, still_saving, until_resized, wanted_resize
from ddpjob_operator.core.gang.group import finds_no_place, takes_others, until_no_place
from ddpjob_operator.core.gang.in_place import syncs, until_synced
from ddpjob_operator.core.gang.members import (
    LEAST_WAIT_SECONDS,
    avoiding_gone_nodes,
    can_be_kept,
    current_group,
    discard,
    ends_of_waits,
    fill_gang,
    lacks_pods,
    left_over,
    members,
    until_filled,
    with_node_counts,
)
from ddpjob_operator.core.gang.problems import (
    maybe_refused,
    until_startup_problem,
    until_warnings_are_read,
    warnings_to_read,
    with_problems,
)
from ddpjob_operator.core.gang.spares import ready_spares, spare_actions, wanted
from ddpjob_operator.core.manifests.admission import admission
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.stages.all_or_nothing import plan_release, until_released
from ddpjob_operator.core.stages.finished import plan_refused
from ddpjob_operator.core.stages.initialize import left_over_sidecars, plan_initializers
from ddpjob_operator.core.stages.restart import Cause, next_attempt, plan_restart, resize, restart_of_edited
from ddpjob_operator.core.values.actions import Action, Event, Plan, soonest
from ddpjob_operator.core.values.changes import with_node_names_refused
from ddpjob_operator.core.values.job import SHOWN_DIGEST, in_words
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import PodView

NODES_FORGIVEN = "NodesForgiven"
NODES_PREFERRED = "NodesPreferred"
GROUP_CLOSED = "GroupClosed"


def plan_starting(look: Look) -> Plan:
    """Fetch the data, restart a gang that fails already, and complete one that does not."""
    look, fetching = plan_initializers(look)
    if fetching is not None:
        return fetching
    return (
        restart_of_edited(look, _backoff_left(look))
        or plan_restart(look)
        or _in_new_group(look)
        or _with_forgiven_nodes(look)
        or _with_preferred_nodes(look)
        or complete_gang(look)
    )


def _in_new_group(look: Look) -> Plan | None:
    """Begin again where the pods that this attempt lacks, or that wait, will not be admitted. Nothing failed, so it
    costs no budget.
    """
    gang, pods = look.job.spec.scheduling.gang, members(look)
    why = ""
    if gang == "Kueue":
        reused = look.status.internal.kept_pods
        kept = [pod for pod in look.observed.pods if pod.name in reused and can_be_kept(pod)]
        if any(pod.let_go for pod in pods):
            why = "Kueue has finished the group of pods that wait for admission"
        elif reused and any(finds_no_place(look, pod) for pod in pods):
            why = "a new pod finds no node among those that the group of the reused ones was admitted with"
        elif reused and lacks_pods(look) and not takes_others(look, kept):
            why = "Kueue admits no other pods to the group of those that are reused"
    elif gang != "None":
        known = ("", current_group(look))
        if any(not pod.placed and pod.group not in known for pod in pods):
            why = "pods that wait are of another group than the rest of the gang"
    if not why:
        return None
    return next_attempt(look, Cause(GROUP_CLOSED, why, max(_backoff_left(look), LEAST_WAIT_SECONDS)))


def _with_forgiven_nodes(look: Look) -> Plan | None:
    """Begin again where a pod waits for a node, and may use more of them than when it was created."""
    if not _may_be_forgiven(look):
        return None
    status = forgiven(look.job.spec.restart, look.status, look.now)
    again = [name for name in look.status.excluded_nodes if name not in status.excluded_nodes]
    message = f"{', '.join(again)} may be used again, a day after the last failure there"
    if not again:
        avoided = frozenset(look.status.internal.avoided_nodes)
        again = sorted(avoided.difference(unresponsive_nodes(look), status.excluded_nodes))
        message = f"{', '.join(again)} may be used again: nothing is left there that does not confirm its deletion"
    if not again:
        return None
    event = Event("Normal", NODES_FORGIVEN, message)
    return next_attempt(look.with_status(status), Cause(NODES_FORGIVEN, message, event=event))


def _may_be_forgiven(look: Look) -> bool:
    return bool(_waiting_for_node(look)) and not look.status.internal.node_names_refused


def _with_preferred_nodes(look: Look) -> Plan | None:
    """Begin again where an autoscaler adds no node for a pod that excludes nodes by name, as Karpenter does not. From
    then on pods of this job prefer others: a job that waits for a node that never comes is worse off.
    """
    warned = (look.observed.warnings.get(pod.uid) for pod in maybe_refused(look, members(look)))
    if not any(found and found.refuses_names for found in warned):
        return None
    internal = look.status.internal
    names = ", ".join(dict.fromkeys((*look.status.excluded_nodes, *internal.avoided_nodes)))
    message = (
        "the autoscaler adds no node for pods that exclude nodes by name: from now on they only prefer others to "
        f"{names}; cordon or delete those that are not to be used again"
    )
    event = Event("Warning", NODES_PREFERRED, message)
    look = look.with_status(with_node_names_refused(look.status))
    return next_attempt(
        look, Cause(NODES_PREFERRED, message, max(_backoff_left(look), LEAST_WAIT_SECONDS), event=event)
    )


def _waiting_for_node(look: Look) -> list[PodView]:
    """Also those that Kueue holds back: for a topology it chooses nodes itself, by the affinity of the pods, and a node
    that they keep away from may be what it lacks.
    """
    return [pod for pod in members(look) if not (pod.scheduled or pod.node_name or pod.deleting)]


def complete_gang(look: Look) -> Plan:
    """Complete a gang of which no pod has failed: with another size or another time if it cannot be completed now."""
    if (change := wanted_resize(look)) is not None:
        return resize(look, change)
    return plan_release(look) or _fill(look)


def _fill(look: Look) -> Plan:
    """Delete what is left of older attempts, create what is missing, and update phase and conditions."""
    pods, spares, old = members(look), len(ready_spares(look)), left_over(look)
    forcing = until_forced(old, look.job.spec.restart, look.now)
    stale: tuple[Action, ...] = (
        *discard(look, old, grace_seconds=grace_of_old(look.status)),
        *left_over_sidecars(look),
        *old_groups(look),
    )
    wait = _backoff_left(look) or still_saving(look)
    if wait > 0 and not pods:
        return Plan(with_node_counts(look, spares).status, stale, requeue_after=soonest(wait, forcing))
    admitted = admission(look)
    if isinstance(admitted, Refused):
        return plan_refused(look, admitted)
    lacking = missing_children(look, admitted)
    if look.observed.service is None:
        # even if every pod is there: whether it selects this attempt has to be looked at
        lacking = (create_service(look, admitted), *lacking)
    if lacking:  # no pod may be there before what protects and groups it
        problem = look.observed.problem
        look = look if problem is None else transitions.degrade(look, problem)
        return Plan(look.status, (*stale, *lacking))
    look = avoiding_gone_nodes(look)
    if _may_be_forgiven(look):
        look = look.with_status(dated(look.job.spec.restart, look.status, look.now))
    create = (*fill_gang(look, admitted), *syncs(look), *spare_actions(look))
    before = with_node_counts(look, spares)
    after, events = _advanced(before)
    after = with_problems(after)
    running = after.status.phase is Phase.RUNNING
    return Plan(
        after.status,
        (*stale, *create, *warnings_to_read(after, pods)),
        # the digests of the spec and the nodes to avoid must be on record before any pod is made from them, and that a
        # gang is incomplete again before what shows it is deleted
        status_first=before.status.phase in (None, Phase.PENDING)
        or before.status.phase is not look.job.status.phase
        or before.status.internal.avoided_nodes != look.job.status.internal.avoided_nodes,
        requeue_after=soonest(
            None if running else until_startup_problem(after),
            until_warnings_are_read(after, pods),
            until_released(after),
            until_lost(look.observed.pods, patience(look), look.now),
            forcing,
            until_resized(after),
            until_forgiven(after.status, look.now) if _may_be_forgiven(after) else None,
            until_filled(look),
            until_synced(look),
            until_no_place(look, pods),
            # spares are created once it is on record that the gang runs
            0.0 if running and wanted(after) else None,
        ),
        events=events,
    )


def _backoff_left(look: Look) -> float:
    """Seconds until the next attempt may start."""
    ends = ends_of_waits(look, look.status.restart_at, look.status.retry_at)
    return max((look.seconds_until(end) for end in ends), default=0.0)


def _advanced(look: Look) -> tuple[Look, tuple[Event, ...]]:
    """The phase that follows from the pods that are there, by the node counts of the status."""
    status = look.status
    if status.phase in (None, Phase.PENDING):
        code = f" with code {look.job.code_digest[:SHOWN_DIGEST]}" if look.job.code_digest else ""
        event = Event("Normal", "Starting", f"creating {in_words(look.job.spec.nodes, 'node')}{code}")
        return transitions.start_gang(look, digests(look.job, look.defaults)), (event,)
    if status.nodes.ready == status.nodes.total:
        nodes = "the node runs" if look.gang_size == 1 else f"all {look.gang_size} nodes run"
        message = f"{nodes}, attempt {status.attempt}"
        return transitions.mark_running(look, message), (Event("Normal", "Running", message),)
    return look, ()
