"""Running: every pod of the gang runs. Restart it after a failure, let an elastic one grow, keep its spares."""

from __future__ import annotations

from ddpjob_operator.core import transitions
from ddpjob_operator.core.failure.node_lost import patience, until_lost
from ddpjob_operator.core.gang.children import create_service, lost_children, old_groups
from ddpjob_operator.core.gang.elastic import until_resized, wanted_resize
from ddpjob_operator.core.gang.in_place import syncs, until_synced
from ddpjob_operator.core.gang.live import without_replaced
from ddpjob_operator.core.gang.members import (
    discard,
    ended_before,
    fill_gang,
    left_over,
    until_filled,
    with_node_counts,
)
from ddpjob_operator.core.gang.problems import with_problems
from ddpjob_operator.core.gang.spares import idle_spares, spare_actions, until_spared
from ddpjob_operator.core.manifests.admission import admission
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.stages.restart import plan_restart, resize, restart_of_edited
from ddpjob_operator.core.stages.starting import complete_gang
from ddpjob_operator.core.values.actions import Action, CreatePod, Plan, soonest
from ddpjob_operator.core.values.job import few
from ddpjob_operator.core.values.look import Look

SILENT_LOOK_SECONDS = 2.0


def plan_running(look: Look) -> Plan:
    """What to do about a gang that runs."""
    look = without_replaced(look)
    if (restart := plan_restart(look) or restart_of_edited(look)) is not None:
        return restart
    if early := [pod.name for pod in look.gang if ended_before(pod, look.status)]:
        message = f"{few(early)} ended before attempt {look.status.attempt} began; it is replaced"
        return complete_gang(transitions.reopen_gang(look, message))
    if (change := wanted_resize(look)) is not None:
        return resize(look, change)
    return _tend(look)


def _replacements(look: Look) -> tuple[Action, ...]:
    """Pods for the node ranks that lost theirs while the others train on, once the names of those are free."""
    if not look.status.internal.lost_pods:
        return ()
    admitted, taken = admission(look), {pod.name for pod in look.observed.pods}
    if isinstance(admitted, Refused):
        return ()
    if look.observed.service is None:  # this process has not asked for it yet, and pods need its address
        return (create_service(look, admitted),)
    actions = fill_gang(look, admitted)
    return tuple(action for action in actions if not (isinstance(action, CreatePod) and action.name in taken))


def _tend(look: Look) -> Plan:
    """Delete what older attempts left, keep as many spares as wanted, restore children, and update the status."""
    actions: list[Action] = [*discard(look, left_over(look)), *old_groups(look), *syncs(look)]
    for wanted in (_replacements(look), spare_actions(look), lost_children(look)):  # each may need the Service
        actions += [action for action in wanted if action not in actions]
    look = with_problems(with_node_counts(look, len(idle_spares(look))))
    lost = until_lost(look.observed.pods, patience(look), look.now)
    if lost is not None:
        lost = min(lost, SILENT_LOOK_SECONDS)  # by then the gang may stand still
    wait = soonest(lost, until_resized(look), until_spared(look), until_synced(look))
    if look.status.internal.lost_pods:
        wait = soonest(wait, until_filled(look))
    return Plan(look.status, tuple(actions), requeue_after=wait)
