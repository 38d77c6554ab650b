"""Which nodes a job keeps away from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, NOW, failed, in_phase, later, make_job, make_pod, make_report, seen
from hypothesis import given
from hypothesis import strategies as st
from looks import at

from ddpjob_operator.api.policies import Restart
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.failure.detect import Failure, Retry
from ddpjob_operator.core.failure.node_exclusion import (
    FORGIVEN_SECONDS,
    NODES_KEPT,
    blame_node,
    forgiven,
    kept_away_from,
    newly_excluded,
    until_forgiven,
    unwelcome,
)
from ddpjob_operator.core.manifests.placement import preferring_others
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values.actions import CreatePod, Plan
from ddpjob_operator.core.values.observed import PodView, Termination


def killed(node: str | None = "a", reason: str = "WorkerKilled", message: str = "") -> Failure:
    return Failure(reason, message, Retry.YES, node_name=node)


def blamed(
    status: DDPJobStatus, failure: Failure, ran_on: tuple[str, ...], limit: int = 3, *, exclude: bool = False
) -> DDPJobStatus:
    """The status after one failure of a job with pods on these nodes."""
    pods = [replace(make_pod(rank), node_name=node) for rank, node in enumerate(ran_on)]
    job = make_job(status, restart={"excludeNodeAfter": limit})
    return blame_node(at(job, seen(*pods)), failure, exclude=exclude)


def after(
    *nodes: str | None, ran_on: tuple[str, ...] = ("a", "b"), limit: int = 3, status: DDPJobStatus | None = None
) -> DDPJobStatus:
    """The status after failures on these nodes."""
    found = status or DDPJobStatus()
    for node in nodes:
        found = blamed(found, killed(node), ran_on, limit)
    return found


@pytest.mark.parametrize(
    ("nodes", "ran_on", "limit", "excluded", "disliked"),
    [
        pytest.param("aa", ("a", "b"), 3, (), (), id="less than three failures are forgiven"),
        pytest.param("aaa", ("a", "b"), 3, ("a",), (), id="the third rules the node out"),
        pytest.param("aba", ("a", "b"), 2, ("a",), (), id="each node is counted by itself"),
        pytest.param("abab", ("a", "b"), 2, ("a",), ("b",), id="the last node that is known is kept"),
        pytest.param("aaa", ("a",), 3, (), ("a",), id="so is the only one, but any other is preferred"),
        pytest.param("aaab", ("a",), 3, ("a",), (), id="it is ruled out when another one is known"),
        pytest.param("aaaaa", ("a", "b"), 0, (), (), id="0 means never"),
        pytest.param("a", ("a", "b"), 1, ("a",), (), id="1 means at once"),
        pytest.param((None, None, None), ("a", "b"), 1, (), (), id="a failure without a node is nobody's"),
    ],
)
def test_a_node_that_failed_too_often_is_avoided(
    nodes: Any, ran_on: tuple[str, ...], limit: int, excluded: tuple[str, ...], disliked: tuple[str, ...]
) -> None:
    found = after(*nodes, ran_on=ran_on, limit=limit)
    assert found.excluded_nodes == excluded
    assert unwelcome(Restart(exclude_node_after=limit), found) == disliked


@pytest.mark.parametrize(
    ("failure", "counts"),
    [
        pytest.param(killed(), True, id="a kill"),
        pytest.param(killed(reason="NodeLost"), True, id="a node that fell silent"),
        pytest.param(killed(reason="Evicted"), True, id="a node that ran short of something"),
        pytest.param(killed(reason="WorkerException", message="CUDA error: uncorrectable ECC error"), True, id="a GPU"),
        pytest.param(killed(reason="Failed"), True, id="an end without a word"),
        pytest.param(killed(reason="WorkerException", message="ValueError: bad"), False, id="the script's exception"),
        pytest.param(killed(reason="OOMKilled"), False, id="the container's own limit"),
        pytest.param(killed(reason="PeerLost"), False, id="another pod's end"),
        pytest.param(killed(reason="Preempted"), False, id="a more important pod"),
    ],
)
def test_only_what_may_be_the_nodes_doing_is_held_against_it(failure: Failure, counts: bool) -> None:
    found = blamed(DDPJobStatus(), failure, ("a", "b"))
    assert found.node_failures == ({"a": 1} if counts else {})


@pytest.mark.parametrize("ran_on", [("a", "b"), ("a",)], ids=["one of two", "the only one"])
def test_what_a_rule_excludes_is_ruled_out_at_once(ran_on: tuple[str, ...]) -> None:
    failure = killed(reason="WorkerException", message="ValueError: bad")
    found = blamed(DDPJobStatus(), failure, ran_on, exclude=True)
    assert found.excluded_nodes == ("a",)
    assert blamed(found, failure, ran_on, exclude=True).excluded_nodes == ("a",)


def test_a_failure_on_an_unknown_node_excludes_nothing_whatever_a_rule_says() -> None:
    assert blamed(DDPJobStatus(), killed(None), ("a",), exclude=True) == DDPJobStatus()


def test_people_are_told_which_nodes_and_why() -> None:
    found = after("a", "a", "a")
    assert newly_excluded(after("a", "a"), found) == "new pods keep away from a, which failed this job 3 times"
    assert newly_excluded(found, after("b", status=found)) == ""
    assert "a (status.excludedNodes)" in kept_away_from(found)
    assert kept_away_from(DDPJobStatus()) == ""


@given(st.lists(st.sampled_from([f"node-{number}" for number in range(90)]), max_size=200), st.integers(0, 3))
def test_a_status_remembers_so_many_nodes_and_one_is_always_left(nodes: list[str], limit: int) -> None:
    found = after(*nodes, ran_on=tuple(nodes[:1]), limit=limit)
    assert len(found.node_failures) <= NODES_KEPT
    assert len(found.excluded_nodes) <= NODES_KEPT
    assert len(set(found.excluded_nodes)) == len(found.excluded_nodes)
    assert not nodes or set(nodes) - set(found.excluded_nodes), "every node that is known was ruled out"


def test_of_more_nodes_than_are_remembered_the_newest_and_the_worst_stay() -> None:
    twice = {f"node-{number:02}": 2 for number in range(NODES_KEPT - 1)}
    found = after("newest", status=DDPJobStatus(node_failures={"a-once": 1, **twice}), limit=0).node_failures
    assert found == twice | {"newest": 1}


def test_the_newest_is_remembered_though_all_others_failed_more_often() -> None:
    twice = {f"node-{number:02}": 2 for number in range(NODES_KEPT)}
    found = after("a-newest", status=DDPJobStatus(node_failures=twice), limit=0).node_failures
    assert found["a-newest"] == 1
    assert len(found) == NODES_KEPT


def test_as_many_nodes_as_are_remembered_all_stay() -> None:
    once = {f"node-{number:02}": 1 for number in range(NODES_KEPT - 1)}
    assert after("newest", status=DDPJobStatus(node_failures=once), limit=0).node_failures == once | {"newest": 1}


def test_where_one_has_to_be_left_it_is_the_one_that_failed_least() -> None:
    failed_more = DDPJobStatus(node_failures={"a": 1, "b": 3})
    assert after("a", ran_on=("a", "b"), limit=2, status=failed_more).excluded_nodes == ("b",)


def test_people_are_told_of_each_node_by_itself() -> None:
    before = DDPJobStatus()
    found = DDPJobStatus(excluded_nodes=("a", "b", "c"), node_failures={"a": 1, "b": 2})
    assert newly_excluded(before, found) == (
        "new pods keep away from a, which failed this job once; from b, which failed this job 2 times; "
        "from c, which failed this job once"
    )
    assert kept_away_from(found).startswith("it keeps away from a, b, c (status.excludedNodes)")


def not_on(*nodes: str) -> dict[str, Any]:
    return {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]}


def test_a_preference_is_added_to_what_the_template_prefers() -> None:
    theirs = {"weight": 7, "preference": {"matchExpressions": [{"key": "disk", "operator": "Exists"}]}}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [theirs]}
    manifest = {"kind": "Pod", "spec": {"affinity": {"nodeAffinity": preferred, "podAffinity": {"x": 1}}, "y": 2}}
    found = preferring_others(manifest, ("b", "a"))
    ours = {"weight": 100, "preference": not_on("a", "b")}
    of_nodes = {"preferredDuringSchedulingIgnoredDuringExecution": [theirs, ours]}
    assert found["spec"] == {"affinity": {"nodeAffinity": of_nodes, "podAffinity": {"x": 1}}, "y": 2}
    assert preferring_others(manifest, ()) is manifest


# In the plan


def on(node: str, pod: PodView) -> PodView:
    return replace(pod, node_name=node)


def look(status: DDPJobStatus, *pods: Any, **restart: Any) -> Plan:
    policy = {"backoff": {"initialSeconds": 0, "maxSeconds": 0}} | restart
    return plan(make_job(status, restart=policy), seen(*pods), NOW, DEFAULTS)


def affinities(decided: Plan) -> list[Any]:
    made = [action.manifest["spec"] for action in decided.actions if isinstance(action, CreatePod)]
    return [spec.get("affinity", {}).get("nodeAffinity") for spec in made]


def test_the_pods_of_the_next_attempt_keep_away_from_a_node_that_is_excluded() -> None:
    running = in_phase(Phase.RUNNING, node_failures={"node-1": 2})
    decided = look(running, make_pod(0), failed(1, 137))
    required = {"nodeSelectorTerms": [not_on("node-1")]}
    assert affinities(decided) == [{"requiredDuringSchedulingIgnoredDuringExecution": required}] * 2
    assert decided.status.node_failures == {"node-1": 3}
    assert decided.status.excluded_nodes == ("node-1",)
    assert "new pods keep away from node-1, which failed this job 3 times" in decided.events[0].message


def test_a_job_on_one_node_prefers_others_and_may_go_on_there() -> None:
    running = in_phase(Phase.RUNNING, node_failures={"only": 2})
    decided = look(running, on("only", make_pod(0)), on("only", failed(1, 137)))
    (first, _) = affinities(decided)
    assert list(first) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    assert decided.status.excluded_nodes == ()


def test_a_rule_excludes_the_node_of_the_pod_that_it_matched() -> None:
    message = make_report("WorkerException", message="rank 1 raised: CUDA error: uncorrectable ECC error encountered")
    broken = make_pod(1, "Failed", termination=Termination(1, message=message))
    rule = {"reasons": ["GPUFault"], "action": "ExcludeNode"}
    decided = look(in_phase(Phase.RUNNING), make_pod(0), broken, rules=[rule])
    assert decided.status.attempt == 1
    assert decided.status.excluded_nodes == decided.status.internal.rule_excluded_nodes == ("node-1",)
    assert decided.status.restarts == 1
    assert "restart.rules[0] (reason GPUFault) says ExcludeNode" in decided.events[0].message


def test_a_pod_that_could_live_on_does_not_do_so_on_a_node_that_is_excluded() -> None:
    spec = {"nodes": 3, "restart": {"scope": "InPlace"}}
    started_with = digests(make_job(**spec), DEFAULTS)
    running = in_phase(Phase.RUNNING, nodes=3, spec_digests=started_with, node_failures={"bad": 2})
    pods = (make_pod(0), on("bad", make_pod(1)), on("bad", failed(2, 137)))
    assert set(plan(make_job(running, **spec), seen(*pods), NOW, DEFAULTS).status.internal.kept_pods) == {"digits-0-0"}


def test_a_spare_does_not_take_a_place_on_a_node_that_is_excluded() -> None:
    spec = {"nodes": 2, "spares": 2, "restart": {"scope": "InPlace"}}
    started_with = digests(make_job(**spec), DEFAULTS)
    running = in_phase(Phase.RUNNING, spec_digests=started_with, node_failures={"bad": 2})
    spares = [
        replace(make_pod(0, ready=True), node_rank=None, name=f"digits-0-s{index}", uid=f"s{index}", node_name=node)
        for index, node in enumerate(("bad", "good"))
    ]
    pods = (make_pod(0), on("bad", failed(1, 137)), *spares)
    kept = plan(make_job(running, **spec), seen(*pods), NOW, DEFAULTS).status.internal.kept_pods
    assert set(kept) == {"digits-0-0", "digits-0-s1"}


def test_a_pod_that_finds_no_node_says_which_ones_it_keeps_away_from() -> None:
    starting = in_phase(Phase.STARTING, excluded_nodes=("node-1",))
    waiting = make_pod(0, "Pending", reason="Unschedulable", message="0/2 nodes are available")
    degraded = next(one for one in look(starting, waiting, make_pod(1)).status.conditions if one.type == "Degraded")
    assert "keeps away from node-1 (status.excludedNodes)" in degraded.message


def test_a_node_is_forgiven_a_day_after_its_last_failure() -> None:
    status = after(*"aaab", limit=3)
    assert (status.excluded_nodes, status.node_failures) == (("a",), {"a": 3, "b": 1})
    job = make_job(status, restart={"excludeNodeAfter": 3})
    pods = seen(*(replace(make_pod(rank), node_name=name) for rank, name in enumerate("bc")))
    soon = blame_node(at(job, pods, FORGIVEN_SECONDS - 1), killed("b"), exclude=False)
    assert (soon.excluded_nodes, soon.node_failures) == (("a",), {"a": 3, "b": 2})
    late = blame_node(at(job, pods, FORGIVEN_SECONDS + 1), killed("b"), exclude=False)
    assert (late.excluded_nodes, late.node_failures) == ((), {"b": 1})


def test_failures_without_a_time_are_forgiven_too() -> None:
    """Version 0.1.0 has recorded none."""
    policy = Restart(exclude_node_after=3)
    dated = forgiven(policy, DDPJobStatus(node_failures={"a": 3, "b": 1}, excluded_nodes=("a",)), NOW)
    assert (dated.node_failures, dated.excluded_nodes) == ({"a": 3, "b": 1}, ("a",))
    assert dated.node_failure_times == {"a": NOW, "b": NOW}
    assert forgiven(policy, dated, later(FORGIVEN_SECONDS - 1)) == dated
    late = forgiven(policy, dated, later(FORGIVEN_SECONDS + 1))
    assert (late.node_failures, late.node_failure_times, late.excluded_nodes) == ({}, {}, ())


def test_what_a_rule_has_excluded_without_a_time_stays_excluded() -> None:
    """Version 0.1.0 has recorded neither the time nor the rule."""
    policy = Restart(exclude_node_after=3)
    known = DDPJobStatus(node_failures={"counted": 3, "ruled": 1}, excluded_nodes=("ruled", "counted"))
    late = forgiven(policy, forgiven(policy, known, NOW), later(FORGIVEN_SECONDS + 1))
    assert late.excluded_nodes == late.internal.rule_excluded_nodes == ("ruled",)


def test_a_month_of_failures_rules_no_node_out() -> None:
    status = DDPJobStatus()
    for day in range(30):
        job = make_job(status, restart={"excludeNodeAfter": 3})
        pods = seen(*(replace(make_pod(rank), node_name=name) for rank, name in enumerate("abc")))
        status = blame_node(at(job, pods, day * 90_000), killed("abc"[day % 3]), exclude=False)
    assert status.excluded_nodes == ()


def test_what_a_rule_excludes_stays_excluded() -> None:
    status = blamed(DDPJobStatus(), killed("a"), ("a", "b"), exclude=True)
    job = make_job(status, restart={"excludeNodeAfter": 3})
    late = blame_node(at(job, seen(), 10 * FORGIVEN_SECONDS), killed("b"), exclude=False)
    assert late.excluded_nodes == ("a",)


@pytest.mark.parametrize("limit", [1, 3], ids=["its first failure", "its third failure"])
def test_what_a_rule_excludes_stays_excluded_also_where_its_failures_reach_the_limit(limit: int) -> None:
    status = after(*"aa"[: limit - 1], limit=limit)
    status = blamed(status, killed("a"), ("a", "b"), limit, exclude=True)
    assert (status.excluded_nodes, status.node_failures) == (("a",), {"a": limit})
    assert until_forgiven(status, NOW) is None
    job = make_job(status, restart={"excludeNodeAfter": limit})
    late = blame_node(at(job, seen(), 10 * FORGIVEN_SECONDS), killed("b"), exclude=False)
    assert "a" in late.excluded_nodes


@pytest.mark.parametrize("limit", [0, 5], ids=["no limit any more", "a higher one"])
def test_what_a_count_has_excluded_is_forgiven_whatever_the_limit_is_by_then(limit: int) -> None:
    status = after(*"aaa", limit=3)
    job = make_job(status, restart={"excludeNodeAfter": limit})
    late = blame_node(at(job, seen(), FORGIVEN_SECONDS + 1), killed("b"), exclude=False)
    assert late.excluded_nodes == ()


@pytest.mark.parametrize("reason", ["Drained", "Disrupted", "NodeTainted", "NodeRebooted"])
def test_maintenance_is_no_fault_of_a_node(reason: str) -> None:
    assert blamed(DDPJobStatus(), killed(reason=reason), ("a", "b"), limit=1).node_failures == {}
