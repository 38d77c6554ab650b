"""The promises of the design, each checked against the whole history of a `small_cluster`."""

from __future__ import annotations

import re

from small_cluster import Cluster

from ddpjob_operator.api.immutable import immutable_digests
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.ledger.goodput import seconds_of
from ddpjob_operator.core.ledger.usage import HELD, usage_between
from ddpjob_operator.core.stages.suspend import is_suspending
from ddpjob_operator.core.values.actions import AssignPod, CreateChild, CreatePod, DeletePod, DeletePodGroup
from ddpjob_operator.core.values.changes import with_generation
from ddpjob_operator.core.values.names import LABEL_GROUP


def check_history(cluster: Cluster) -> None:
    """The promises that hold for every history, whatever happened in it."""
    check_one_live_pod_each(cluster)
    check_counted_once(cluster)
    check_budget(cluster)
    check_final_is_final(cluster)
    check_attempt_on_record_first(cluster)
    check_no_flip_flop(cluster)
    check_nothing_is_created_while_suspended(cluster)
    check_force_is_asked_for(cluster)
    check_sizes(cluster)
    check_time_adds_up(cluster)
    check_usage_adds_up(cluster)
    check_data_comes_first(cluster)
    check_tries_of_data(cluster)
    check_group_comes_first(cluster)
    check_logs_are_kept(cluster)
    check_ends_are_on_record(cluster)
    check_begun_once(cluster)
    check_made_alike(cluster)


def check_one_live_pod_each(cluster: Cluster) -> None:
    for alive in cluster.live:
        assert len(set(alive)) == len(alive), f"two live pods for one node of one attempt: {alive}"


def check_counted_once(cluster: Cluster) -> None:
    """An attempt is a restart or a disruption, unless an edit of the spec, the end of a suspension, a node that may be
    used again or a gang that could not be completed began it. A live recovery is one within its attempt.
    """
    before = DDPJobStatus()
    for status in cluster.statuses:
        attempts, restarts = status.attempt - before.attempt, status.restarts - before.restarts
        disruptions = status.disruptions - before.disruptions
        assert attempts in (0, 1), f"{attempts} attempts in one write"
        if (attempts, restarts, disruptions) == (0, -1, 1):  # a later sign showed that a node was gone
            assert status.last_failure != before.last_failure
            restarts = disruptions = 0
        assert min(restarts, disruptions) >= 0, "a counter went back"
        free = any(
            c.type == "Restarting" and c.reason in ("SpecChanged", "Resumed", "NodesForgiven", "NodesPreferred")
            for c in status.conditions
        )
        free = free or (status.retry_at is not None and status.retry_at != before.retry_at)
        counted = restarts + disruptions
        recoveries = (status.live_recoveries or 0) - (before.live_recoveries or 0)
        assert (recoveries, attempts) in ((0, 0), (1, 0), (0, 1)), "a recovery is a write of its own"
        expected = 0 if free and counted == 0 else attempts + recoveries
        assert counted == expected, f"attempt {status.attempt} counted {counted} times"
        before = status


def check_budget(cluster: Cluster) -> None:
    """No more restarts without progress than there may be, and no job given up for a repetition that was none."""
    most = cluster.job.spec.restart.max_restarts
    for status in cluster.statuses:
        assert status.restarts_since_progress <= most, f"attempt {status.attempt} exceeds the budget of {most}"
        if any(condition.reason == "RepeatedFailure" for condition in status.conditions):
            first, second = (
                (one.step, one.reason, re.sub(r"\d+", "#", one.message.split("\n")[0])) for one in status.failures[-2:]
            )
            assert first == second, f"{first} and {second} are not the same"


def check_final_is_final(cluster: Cluster) -> None:
    """Nothing of a final status changes any more but the generation that it is of."""
    final: DDPJobStatus | None = None
    for entry in cluster.history:
        if final is None:
            final = entry if isinstance(entry, DDPJobStatus) and entry.phase and entry.phase.final else None
            continue
        if isinstance(entry, DDPJobStatus):
            same = entry == with_generation(final, entry.observed_generation or 0)
            assert same, f"a final status was changed: {entry}"
        assert not isinstance(entry, CreatePod), f"{entry.name} was created after the job was {final.phase}"


def check_time_adds_up(cluster: Cluster) -> None:
    """The ledger holds every second since the job began exactly once, and none is ever taken back."""
    whole, until = 0.0, None
    for status in cluster.statuses:
        ledger = status.goodput
        if ledger is None:
            assert status.start_time is None, "a job that has begun has a ledger"
            continue
        assert status.start_time is not None
        assert ledger.last_update_time is not None
        seconds = sum(seconds_of(ledger).values())
        assert round(seconds, 3) == round((ledger.last_update_time - status.start_time).total_seconds(), 3)
        assert seconds >= whole
        assert until is None or ledger.last_update_time >= until
        whole, until = seconds, ledger.last_update_time
    last = cluster.statuses[-1] if cluster.statuses else DDPJobStatus()
    if last.phase is not None and last.phase.final and last.goodput is not None:
        assert last.goodput.last_update_time is not None
        assert last.completion_time is not None
        # a clock that was set back takes nothing away
        assert last.goodput.last_update_time >= last.completion_time, "a job that is over has all its time counted"


def check_usage_adds_up(cluster: Cluster) -> None:
    """What the writes add up to is what the last ledger says; nothing is counted twice, and nothing backwards."""
    counted, lost, before = dict.fromkeys(HELD, 0.0), 0.0, DDPJobStatus()
    for status in cluster.statuses:
        usage = usage_between(before, status)
        assert min([usage.lost, *usage.seconds.values()]) >= 0, usage
        for activity, seconds in usage.seconds.items():
            counted[activity] += seconds
        lost, before = lost + usage.lost, status
    if before.goodput is not None:
        ledger = seconds_of(before.goodput)
        moved = counted | {"training": counted["training"] - lost, "recovering": counted["recovering"] + lost}
        assert {name: round(seconds, 2) for name, seconds in moved.items()} == {
            name: round(ledger[name], 2) for name in HELD
        }


def check_attempt_on_record_first(cluster: Cluster) -> None:
    """A pod is only ever made or kept for the attempt, and from the spec, that the status has on record."""
    recorded = DDPJobStatus()
    for entry in cluster.history:
        if isinstance(entry, DDPJobStatus):
            recorded = entry
        elif isinstance(entry, CreatePod):
            assert entry.attempt == recorded.attempt, f"{entry.name} created during attempt {recorded.attempt}"
            if entry.node_rank is None:
                assert recorded.phase is Phase.RUNNING, f"{entry.name} takes a node while the gang is {recorded.phase}"
            else:
                starts = recorded.phase in (Phase.STARTING, Phase.RESTARTING)
                is_replacement = entry.node_rank in recorded.internal.lost_pods.values()
                assert starts or is_replacement, f"{entry.name} created while {recorded.phase}"
                assert entry.name == f"digits-{entry.attempt}-{entry.node_rank}", f"{entry.name} is nobody's name"
            nodes = {item["name"]: item.get("value") for item in entry.manifest["spec"]["containers"][0]["env"]}
            assert nodes["DDPJOB_NODES"] == str(recorded.nodes.total), f"{entry.name} belongs to another gang"
        elif isinstance(entry, AssignPod):
            assert entry.attempt == recorded.attempt, f"{entry.name} assigned to attempt {entry.attempt} too soon"
            assert recorded.internal.kept_pods[entry.name] == entry.node_rank, (
                f"{entry.name} assigned another's node rank"
            )
            assert entry.nodes == recorded.nodes.total, f"{entry.name} assigned to another gang"


def check_data_comes_first(cluster: Cluster) -> None:
    """No pod of the gang is made before the initializers have prepared the volume, nor the data again.

    A try that was given up, since its node was gone, may come to a good end after all: nobody waits for it.
    """
    there, given_up = not cluster.job.spec.initializers, 0
    for entry in cluster.history:
        match entry:
            case DDPJobStatus():
                given_up = _tries(entry)
            case (str(name), 0):
                there = there or name == f"digits-init-{given_up}"
            case CreatePod(name):
                assert there, f"{name} was created before its data was there"
            case CreateChild(manifest) if manifest["kind"] == "Pod":
                assert not there, f"{manifest['metadata']['name']} fetches what is there"


def check_tries_of_data(cluster: Cluster) -> None:
    """Every try that failed counts once, the one after it has the next number, and there are four at most besides those
    that the cluster ended.
    """
    failed: set[str] = set()
    counted = tries = 0
    for entry in cluster.history:
        match entry:
            case (str(name), int(code)) if code:
                failed.add(name)
            case DDPJobStatus():
                assert tries <= _tries(entry) <= tries + 1, "counted twice"
                assert entry.initializer_failures >= counted, "a failure is forgotten"
                counted, tries = entry.initializer_failures, _tries(entry)
            case CreateChild(manifest) if manifest["kind"] == "Pod":
                assert manifest["metadata"]["name"] == f"digits-init-{tries}", "a try that is not on record"
                assert counted <= 3, "a fifth try"
    assert counted >= len(failed) - 1, "a failure that was never counted"  # the last may have met the job's own end


def _tries(status: DDPJobStatus) -> int:
    return status.initializer_failures + (status.internal.initializer_disruptions or 0)


def check_group_comes_first(cluster: Cluster) -> None:
    """Pods of a gang that is admitted as a whole are made when their group is there, and it is gone after the job."""
    if cluster.job.spec.scheduling.gang not in ("Coscheduling", "Volcano"):
        return
    there = set[str]()
    for entry in cluster.history:
        match entry:
            case CreateChild(manifest) if manifest["kind"] == "PodGroup":
                there.add(manifest["metadata"]["name"])
            case DeletePodGroup(name=name):
                there.discard(name)
            case CreatePod(manifest=manifest):
                assert manifest["metadata"]["labels"][LABEL_GROUP] in there, "a pod was created before its group"
    if cluster.job.status.is_final and all(pod.ended for pod in cluster.pods.values()):
        assert cluster.pod_groups == set(), "what it asks for stays reserved"


def check_logs_are_kept(cluster: Cluster) -> None:
    """Where `cleanPodPolicy` is Running, a pod that has ended stays, whatever its kubelet says of its phase."""
    assert cluster.logs_lost == [], "pods were deleted, and their logs with them"


def check_ends_are_on_record(cluster: Cluster) -> None:
    """No pod of the gang vanishes before the status says how it ended, or is about another attempt."""
    assert cluster.ends_lost == [], "nobody will know how these pods ended"


def check_begun_once(cluster: Cluster) -> None:
    """One pod at most begins as a node rank of an attempt: the fencing token of the volume tells attempts apart, and no
    two pods of one. A pod that has not begun may be created again."""
    if cluster.job.spec.restart.scope == "Live":
        return  # the ranks themselves keep a forerunner out
    assert cluster.begun_again == [], "their forerunners may still run and save"


def check_made_alike(cluster: Cluster) -> None:
    """All pods of an attempt save at the same steps, whenever they were made: others would wait for them for ever.

    Spares that show whether an elastic gang could grow are made whatever was edited.
    """
    if cluster.job.spec.elastic is not None:
        return
    made, of_attempt = dict[str, str](), dict[int, set[str]]()
    for entry in cluster.history:
        if isinstance(entry, CreatePod):
            env = {item["name"]: item.get("value") for item in entry.manifest["spec"]["containers"][0]["env"]}
            made[entry.name] = env["DDPJOB_SNAPSHOT_EVERY"]
        if isinstance(entry, AssignPod) or (isinstance(entry, CreatePod) and entry.node_rank is not None):
            of_attempt.setdefault(entry.attempt, set()).add(made[entry.name])
    assert all(len(intervals) == 1 for intervals in of_attempt.values()), of_attempt


def check_sizes(cluster: Cluster) -> None:
    """Only an elastic gang is ever smaller than asked for, and never below its minimum."""
    elastic = cluster.job.spec.elastic
    for before, status in zip(cluster.statuses, cluster.statuses[1:], strict=False):
        if elastic is not None and status.internal.spec_digests is not None:
            assert status.nodes.total >= elastic.min_nodes, f"{status.nodes.total} nodes are too few"
        if before.internal.spec_digests is not None and status.nodes.total != before.nodes.total:
            assert status.attempt == before.attempt + 1, f"attempt {status.attempt} changed its size"
            assert elastic is not None or status.internal.spec_digests != before.internal.spec_digests, (
                "the gang is not elastic"
            )
        made_from = (status.internal.spec_digests or {}).get("nodes")
        if elastic is None and made_from == immutable_digests(cluster.job.spec)["nodes"]:
            assert status.nodes.total == cluster.job.spec.nodes, "the record says otherwise"


def check_force_is_asked_for(cluster: Cluster) -> None:
    """A pod that may still run is never taken off the API server against the user's will."""
    forced = [entry.name for entry in cluster.history if isinstance(entry, DeletePod) and entry.grace_seconds == 0]
    allowed = cluster.job.spec.restart.force_delete_lost_pods
    assert allowed or not forced, f"{forced} deleted by force, which the spec does not ask for"


def check_no_flip_flop(cluster: Cluster) -> None:
    """Two statuses are never written by turns, unless each time the pods changed from outside.

    How many nodes are ready is left out.
    """
    written = [status.model_copy(update={"nodes": DDPJobStatus().nodes}) for status in cluster.statuses]
    for index, (first, second, third, fourth) in enumerate(
        zip(written, written[1:], written[2:], written[3:], strict=False)
    ):
        by_turns = first == third and second == fourth and first != second
        events = cluster.events_before[index : index + 4]
        followed = len(set(events)) == len(events)
        assert followed or not by_turns, f"the status goes back and forth between {first} and {second}"


def check_nothing_is_created_while_suspended(cluster: Cluster) -> None:
    """Nor while the pods of a suspended job still stop, which is on record before the first of them is deleted."""
    recorded = DDPJobStatus()
    for entry in cluster.history:
        if isinstance(entry, DDPJobStatus):
            recorded = entry
        elif isinstance(entry, CreatePod):
            halted = recorded.phase is Phase.SUSPENDED or is_suspending(recorded)
            assert not halted, f"{entry.name} was created while resumed after a suspension"
