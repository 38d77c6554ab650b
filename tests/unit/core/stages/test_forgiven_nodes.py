"""A node that the job keeps away from is used again after a day, also where a pod waits for it all the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, NOW, failed, in_phase, later, make_job, make_pod, seen
from small_cluster import avoided_nodes
from world import World

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.failure.node_exclusion import FORGIVEN_SECONDS
from ddpjob_operator.core.manifests.placement import PREFERRED, REQUIRED
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values.actions import CreatePod, Plan, ReadWarnings
from ddpjob_operator.core.values.observed import PodPhase, PodView, PodWarning

DAY = FORGIVEN_SECONDS + 1


NOT_ON_NODE_1 = {"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}


def look(
    *pods: PodView, seconds: float, scope: str = "Gang", status: DDPJobStatus | None = None, attempt: int = 0
) -> Plan:
    spec = {"nodes": 2, "restart": {"scope": scope}}
    started_with = digests(make_job(**spec), DEFAULTS)
    given = status or in_phase(Phase.RESTARTING, nodes=2, attempt=0, spec_digests=started_with, **EXCLUDED)
    return plan(make_job(given, **spec), seen(*pods, attempt=attempt), later(seconds), DEFAULTS)


EXCLUDED: dict[str, Any] = {
    "excluded_nodes": ("node-1",),
    "node_failures": {"node-1": 3},
    "node_failure_times": {"node-1": NOW},
}
WAITS = replace(make_pod(1, "Pending", scheduled=False), node_name=None, created=NOW)


def test_a_pod_that_kueue_holds_back_may_wait_for_the_node_that_it_keeps_away_from() -> None:
    """Kueue finds no topology for a group whose pods exclude one node of those that there are."""
    held = replace(WAITS, reason="SchedulingGated")
    assert look(held, seconds=DAY - 10).status.attempt == 0
    assert look(held, seconds=DAY).status.attempt == 1


@pytest.mark.parametrize("scope", ["Gang", "InPlace"])
def test_a_pod_that_waits_is_made_anew_once_the_node_is_forgiven(scope: str) -> None:
    before = look(make_pod(0), WAITS, seconds=DAY - 10, scope=scope)
    assert before.status.attempt == 0
    assert before.requeue_after is not None
    assert before.requeue_after <= 10
    after = look(make_pod(0), WAITS, seconds=DAY, scope=scope)
    assert (after.status.attempt, after.status.excluded_nodes, after.status.node_failures) == (1, (), {})
    assert (after.status.restarts or 0, after.status.disruptions or 0) == (0, 0)
    (event,) = after.events
    assert event.reason == "NodesForgiven"
    assert "node-1 may be used again" in event.message
    made = [action for action in after.actions if isinstance(action, CreatePod)]
    assert made
    assert not any("node-1" in str(action.manifest["spec"].get("affinity")) for action in made)


def test_a_pod_that_waits_since_before_an_upgrade_is_made_anew_too() -> None:
    """Version 0.1.0 has recorded no times. The day begins where the newer one sees the pod wait."""
    started_with = digests(make_job(nodes=2, restart={"scope": "Gang"}), DEFAULTS)
    undated = EXCLUDED | {"node_failure_times": {}}
    status = in_phase(Phase.RESTARTING, nodes=2, attempt=0, spec_digests=started_with, **undated)
    first = look(make_pod(0), WAITS, seconds=5, status=status)
    assert (first.status.attempt, first.status.node_failure_times) == (0, {"node-1": later(5)})
    before = look(make_pod(0), WAITS, seconds=DAY - 5, status=first.status)
    assert before.status.node_failure_times == {"node-1": later(5)}
    after = look(make_pod(0), WAITS, seconds=DAY + 5, status=first.status)
    assert (after.status.attempt, after.status.excluded_nodes, after.status.node_failures) == (1, (), {})


def test_a_gang_whose_pods_have_nodes_is_left_alone() -> None:
    pulls = make_pod(1, "Pending", scheduled=True)
    assert look(make_pod(0), pulls, seconds=DAY).status.attempt == 0


def test_a_node_that_a_rule_excluded_stays_excluded() -> None:
    started_with = digests(make_job(nodes=2, restart={"scope": "Gang"}), DEFAULTS)
    status = in_phase(Phase.RESTARTING, nodes=2, attempt=0, spec_digests=started_with, excluded_nodes=("node-1",))
    assert look(make_pod(0), WAITS, seconds=10 * DAY, status=status).status.attempt == 0


AFFINITY = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchFields": [NOT_ON_NODE_1]}]}}}


def test_a_node_that_the_template_rules_out_is_none_to_forgive() -> None:
    """The pods of each attempt that began for it would wait in the same way."""
    world = World.start(nodes=2, podTemplate={"spec": {"affinity": AFFINITY}}, restart={"excludeNodeAfter": 3})
    world.settle()
    world.cluster.pods = {name: replace(pod, node_name="node-1") for name, pod in world.cluster.pods.items()}
    world.cluster.end("digits-0-1", 137)
    world.cluster.capacity = 0
    for _ in range(60):
        world.look()
        world.pass_time(1)
    assert world.status.node_failures == {"node-1": 1}
    assert world.status.attempt == 1


def unconfirmed(rank: int = 1) -> PodView:
    """A pod of the attempt before, on a node that has not confirmed its deletion, and is not ready."""
    return make_pod(rank, attempt=0, deleting=True, gone_by=later(-11), not_ready_since=later(-1))


def restarting(**internal: Any) -> DDPJobStatus:
    spec = {"nodes": 2, "restart": {"scope": "Gang"}}
    made_from = digests(make_job(**spec), DEFAULTS)
    return in_phase(Phase.RESTARTING, attempt=1, spec_digests=made_from, **internal)


def test_the_nodes_to_keep_away_from_are_on_record_before_pods_are_made() -> None:
    decided = look(unconfirmed(), seconds=0, status=restarting(), attempt=1)
    made = [action for action in decided.actions if isinstance(action, CreatePod)]
    assert len(made) == 2
    assert [avoided_nodes(action.manifest["spec"]) for action in made] == [{"node-1"}, {"node-1"}]
    assert decided.status.internal.avoided_nodes == ("node-1",)
    assert decided.status_first


def test_a_deletion_that_takes_long_is_alone_no_reason_to_keep_away_from_a_node() -> None:
    slow = replace(unconfirmed(), not_ready_since=None)
    decided = look(slow, seconds=20, status=restarting(), attempt=1)
    made = [action for action in decided.actions if isinstance(action, CreatePod)]
    assert [avoided_nodes(action.manifest["spec"]) for action in made] == [frozenset(), frozenset()]
    assert decided.status.internal.avoided_nodes == ()


def test_pods_that_follow_in_the_same_attempt_keep_away_from_the_same_nodes() -> None:
    """There is one list for the attempt, not one for each pod."""
    status = restarting(avoided_nodes=("node-1",))
    first = replace(make_pod(0, "Pending", attempt=1), name="digits-1-0")
    decided = look(first, seconds=0, status=status, attempt=1)
    (made,) = [action for action in decided.actions if isinstance(action, CreatePod)]
    assert avoided_nodes(made.manifest["spec"]) == {"node-1"}
    assert decided.status.internal.avoided_nodes == ("node-1",)


WAITING = [replace(WAITS, name=f"digits-1-{rank}", uid=f"u-{rank}", attempt=1, node_rank=rank) for rank in (0, 1)]


def test_pods_that_waited_before_are_not_said_to_keep_away() -> None:
    """They would lose their place in a queue once the node confirms its deletions, for nothing."""
    decided = look(*WAITING, unconfirmed(), seconds=0, status=restarting(), attempt=1)
    assert (decided.status.attempt, decided.status.internal.avoided_nodes) == (1, ())


def test_a_node_that_confirms_its_deletions_again_is_used_again_where_a_pod_waits() -> None:
    status = restarting(avoided_nodes=("node-1",))
    assert look(*WAITING, unconfirmed(), seconds=0, status=status, attempt=1).status.attempt == 1
    after = look(*WAITING, seconds=0, status=status, attempt=1)
    assert (after.status.attempt, after.status.internal.avoided_nodes) == (2, ())
    assert [event.reason for event in after.events] == ["NodesForgiven"]


REFUSED = PodWarning(NOW, refuses_names=True)
UNSCHEDULABLE = replace(WAITING[1], reason="Unschedulable", message="0/1 nodes are available")


def waiting(status: DDPJobStatus, warning: PodWarning | None = None, *others: PodView, seconds: float = 20) -> Plan:
    """One pod of two finds no node, and one of the attempt before has not confirmed its deletion."""
    observed = seen(replace(WAITING[0], phase=PodPhase.RUNNING), UNSCHEDULABLE, unconfirmed(), *others, attempt=1)
    if warning is not None:
        observed = replace(observed, warnings={UNSCHEDULABLE.uid: warning})
    return plan(make_job(status, nodes=2, restart={"scope": "Gang"}), observed, later(seconds), DEFAULTS)


AWAY: list[dict[str, Any]] = [EXCLUDED, {"avoided_nodes": ("node-1",)}]
READ = ReadWarnings(UNSCHEDULABLE.name, UNSCHEDULABLE.uid)


@pytest.mark.parametrize("away", AWAY, ids=["excluded", "avoided"])
def test_an_autoscaler_is_asked_why_a_pod_that_excludes_nodes_finds_none(away: dict[str, Any]) -> None:
    assert READ in waiting(restarting(**away)).actions
    assert READ not in waiting(restarting()).actions
    assert READ not in waiting(restarting(**away, node_names_refused=True)).actions


def test_an_autoscaler_has_some_time_to_answer() -> None:
    early = waiting(restarting(**EXCLUDED), seconds=5)
    assert READ not in early.actions
    assert early.requeue_after is not None
    assert early.requeue_after <= 10


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pod_that_pulls_its_image_does_not_hide_the_one_that_is_refused(rank: int) -> None:
    pulls = replace(WAITING[rank], scheduled=True, node_name="node-2")
    refused = replace(WAITING[1 - rank], reason="Unschedulable")
    job = make_job(restarting(**EXCLUDED), nodes=2, restart={"scope": "Gang"})
    decided = plan(job, seen(pulls, refused, attempt=1), later(20), DEFAULTS)
    assert ReadWarnings(refused.name, refused.uid) in decided.actions


@pytest.mark.parametrize("away", AWAY, ids=["excluded", "avoided"])
def test_where_an_autoscaler_adds_no_node_for_pods_that_exclude_some_they_prefer_others(away: dict[str, Any]) -> None:
    before = restarting(**away)
    assert waiting(before, PodWarning(NOW)).status.attempt == 1
    after = waiting(before, REFUSED)
    assert (after.status.attempt, after.status.internal.node_names_refused) == (2, True)
    assert (after.status.restarts or 0, after.status.disruptions or 0) == (0, 0)
    (event,) = after.events
    assert event.reason == "NodesPreferred"
    assert "prefer others to node-1" in event.message
    assert after.status_first
    job = make_job(after.status, nodes=2, restart={"scope": "Gang"})
    following = plan(job, seen(unconfirmed(), attempt=2), later(30), DEFAULTS)
    made = [action.manifest["spec"] for action in following.actions if isinstance(action, CreatePod)]
    assert [avoided_nodes(spec) for spec in made] == [frozenset(), frozenset()]
    preferred = [term["preference"] for spec in made for term in spec["affinity"]["nodeAffinity"][PREFERRED]]
    assert preferred == [{"matchFields": [NOT_ON_NODE_1]}] * 2


def test_nodes_that_old_pods_are_about_to_give_back_are_waited_for() -> None:
    going = make_pod(0, attempt=0, deleting=True, gone_by=later(25))
    decided = waiting(restarting(**EXCLUDED), REFUSED, replace(going, uid="going", name="digits-0-0"))
    assert decided.status.attempt == 1


@pytest.mark.parametrize("seconds", [20, DAY, 2 * DAY])
def test_pods_that_prefer_others_already_are_not_made_anew(seconds: float) -> None:
    decided = waiting(restarting(**EXCLUDED, node_names_refused=True), REFUSED, seconds=seconds)
    assert decided.status.attempt == 1
    assert decided.requeue_after is None or decided.requeue_after > 0


def test_that_they_prefer_others_is_known_to_the_attempts_that_follow() -> None:
    made_from = digests(make_job(nodes=2), DEFAULTS)
    status = in_phase(Phase.RUNNING, attempt=0, spec_digests=made_from, node_names_refused=True, **EXCLUDED)
    decided = plan(make_job(status, nodes=2), seen(make_pod(0), failed(1, 137)), later(10), DEFAULTS)
    assert (decided.status.attempt, decided.status.internal.node_names_refused) == (1, True)


@pytest.mark.parametrize(("refused", "kept"), [(None, {}), (True, {"digits-0-0": 0})], ids=["excluded", "preferred"])
def test_a_pod_that_runs_where_others_are_preferred_is_reused(refused: bool | None, kept: dict[str, int]) -> None:
    job = make_job(nodes=2, restart={"scope": "InPlace"})
    status = in_phase(
        Phase.RUNNING, attempt=0, spec_digests=digests(job, DEFAULTS), node_names_refused=refused, **EXCLUDED
    )
    there = replace(make_pod(0), node_name="node-1")
    decided = plan(
        make_job(status, nodes=2, restart={"scope": "InPlace"}), seen(there, failed(1, 137)), later(10), DEFAULTS
    )
    assert (decided.status.attempt, decided.status.internal.kept_pods) == (1, kept)
