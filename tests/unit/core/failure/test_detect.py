"""From how pods ended to what went wrong."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from builders import NOW, ended, failed, later, make_pod, make_report, succeeded

from ddpjob_operator.core.failure.detect import (
    SETTLE_SECONDS,
    Failure,
    Retry,
    end_of_restarted_node,
    find_failures,
    first_cause,
    has_succeeded,
    is_stopping,
    with_last_log_line,
)
from ddpjob_operator.core.failure.diagnosis import diagnose
from ddpjob_operator.core.values.observed import InitFailure, PodView

EVICTED = {"reason": "Evicted", "message": "The node was low on resource: memory."}
GONE = {"deleting": True, "gone_by": later(-SETTLE_SECONDS)}
NEVER_BEGAN: dict[str, Any] = GONE | {"phase": "Pending", "began": False}
GOING = {"deleting": True, "gone_by": later(30)}


def case(sentence: str, pod: PodView, reason: str | None, retry: Retry = Retry.YES) -> object:
    return pytest.param(pod, reason, retry, id=sentence)


@pytest.mark.parametrize(
    ("pod", "reason", "retry"),
    [
        case("a pod that runs has not failed", make_pod(), None),
        case("a pod that waits has not failed", make_pod(phase="Pending", reason="ErrImagePull"), None),
        case("a pod whose node is silent has not failed", make_pod(phase="Unknown"), None),
        case("exit code 0 is no failure", succeeded(0), None),
        case("exit code 0 is no failure although a sidecar failed", make_pod(0, "Failed", termination=ended(0)), None),
        case("a message gives the reason", failed(0, 1, "WorkerException"), "WorkerException"),
        case("a stall is restarted", failed(0, 1, "Stalled"), "Stalled"),
        case("exit 64 is never retried", failed(0, 64, "ImportError"), "ImportError", Retry.NEVER),
        case("exit 64 without a message is a user error", failed(0, 64), "UserError", Retry.NEVER),
        case("exit 77 is never retried", failed(0, 77, "Fenced"), "Fenced", Retry.NEVER),
        case("exit 77 without a message is a fence", failed(0, 77), "Fenced", Retry.NEVER),
        case("exit 143 is a preemption", failed(0, 143, "Preempted"), "Preempted"),
        case("exit 143 without a message is a preemption", failed(0, 143), "Preempted"),
        case("exit 137 without a message is a signal", failed(0, 137), "WorkerKilled"),
        case(
            "a signal that the runtime reports is a signal",
            make_pod(0, "Failed", termination=ended(1, signal=9)),
            "WorkerKilled",
        ),
        case("exit 255 is no signal", failed(0, 255), "Failed"),
        case("exit 1 without a message has no better name than Failed", failed(0, 1), "Failed"),
        case("Error is no reason", make_pod(0, "Failed", termination=ended(1, reason="Error")), "Failed"),
        case("nor is Completed", make_pod(0, "Failed", termination=ended(1, reason="Completed")), "Failed"),
        case(
            "a container that never started says so",
            make_pod(0, "Failed", termination=ended(128, "exec: python: not found", reason="StartError")),
            "StartError",
        ),
        case(
            "the kernel's kill wins over the launcher's message",
            make_pod(0, "Failed", termination=ended(137, make_report("WorkerKilled"), reason="OOMKilled")),
            "OOMKilled",
        ),
        case(
            "a pod that stopped in order was not killed, whatever was before",
            make_pod(0, "Failed", termination=ended(143, make_report("Preempted"), reason="OOMKilled")),
            "Preempted",
        ),
        case(
            "a drain explains that",
            make_pod(
                0,
                "Failed",
                termination=ended(143, make_report("Preempted"), reason="OOMKilled"),
                disruption="EvictionByEvictionAPI",
                **GOING,
            ),
            "Drained",
        ),
        case(
            "an error of the script is one also where a process was killed before",
            make_pod(0, "Failed", termination=ended(64, make_report("ImportError"), reason="OOMKilled")),
            "ImportError",
            Retry.NEVER,
        ),
        case(
            "a reason of several words is not taken over",
            make_pod(0, "Failed", termination=ended(1, make_report("I am not a reason!"))),
            "Failed",
        ),
        case(
            "a reason that is no text is not taken over",
            make_pod(0, "Failed", termination=ended(1, make_report(reason=["x"]))),
            "Failed",
        ),
        case(
            "a pod that Kueue ends for a taint of its node",
            make_pod(0, "Failed", disruption="UnschedulableOnAssignedNode"),
            "NodeTainted",
        ),
        case(
            "a pod whose GPU got a taint",
            failed(0, 143, "Preempted", disruption="DeletionByDeviceTaintManager", **GOING),
            "DeviceTainted",
        ),
        case("a deleted pod that never began goes", make_pod(0, "Failed", began=False, **GOING), None),
        case("an eviction without any ending is an eviction", make_pod(0, "Failed", **EVICTED), "Evicted"),
        case(
            "an eviction of which the status has no container is one also where the pod is deleted then",
            make_pod(0, "Failed", began=False, **EVICTED, **GOING),
            "Evicted",
        ),
        *(
            case(
                f"a pod that is evicted for what it wrote itself: {message}",
                failed(0, 137, reason="Evicted", message=message),
                "StorageLimitExceeded",
            )
            for message in (
                'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". ',
                "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
                'Container trainer exceeded its local ephemeral storage limit "1Gi". ',
            )
        ),
        case(
            "a disk that is full may be another pod's doing",
            failed(
                0,
                137,
                reason="Evicted",
                message="The node was low on resource: ephemeral-storage. Container trainer was using 9Gi, "
                "request is 0, has larger consumption of ephemeral-storage. ",
            ),
            "Evicted",
        ),
        case("a node without a free CPU", make_pod(0, "Failed", reason="OutOfcpu"), "OutOfcpu"),
        *(
            case(f"a node without a free {resource}", make_pod(0, "Failed", reason=f"OutOf{resource}"), "OutOfResource")
            for resource in ("nvidia.com/gpu", "ephemeral-storage")
        ),
        case("a taint that came before the pod", make_pod(0, "Failed", reason="TaintToleration"), "NodeTainted"),
        case("an eviction explains exit 137", failed(0, 137, **EVICTED), "Evicted"),
        case("an eviction explains a preemption", failed(0, 143, "Preempted", **EVICTED), "Evicted"),
        case(
            "an eviction does not explain an exception", failed(0, 1, "WorkerException", **EVICTED), "WorkerException"
        ),
        case(
            "a pod that the scheduler removes for a more important one is preempted",
            failed(0, 137, disruption="PreemptionByScheduler", **GOING),
            "Preempted",
        ),
        case(
            "a pod that Kueue removes for a more important workload is preempted",
            failed(0, 143, disruption="WorkloadEvictedDueToPreempted", **GOING),
            "Preempted",
        ),
        case("a pod that a drain removes is drained", failed(0, 143, disruption="EvictionByEvictionAPI"), "Drained"),
        case(
            "a pod that a taint removes, and that ends, leaves its node alone",
            failed(0, 143, disruption="DeletionByTaintManager"),
            "NodeTainted",
        ),
        case(
            "a pod that a taint removes without an answer was on a node that is gone",
            make_pod(disruption="DeletionByTaintManager", **GONE),
            "NodeLost",
        ),
        case(
            "a pod that nobody knows any more was on a node that was restarted",
            make_pod(0, "Failed", termination=ended(255, reason="Unknown")),
            "NodeRebooted",
        ),
        case("a pod of a node that is gone is lost", make_pod(disruption="DeletionByPodGC", **GONE), "NodeLost"),
        case("any other disruption says nothing of the node", make_pod(disruption="SomethingNew", **GONE), "Disrupted"),
        case(
            "a pod that Kueue stops is not evicted by its kubelet",
            failed(0, 143, "Preempted", disruption="WorkloadEvictedDueToClusterQueueStopped", **GOING),
            "Disrupted",
        ),
        case(
            "the kubelet knows best why it ended a pod",
            failed(0, 137, disruption="TerminationByKubelet", reason="Terminated"),
            "Terminated",
        ),
        case(
            "a disruption does not explain an exception",
            failed(0, 1, "WorkerException", disruption="EvictionByEvictionAPI", **GOING),
            "WorkerException",
        ),
        case(
            "a pod that is to be disrupted and runs has not failed", make_pod(disruption="PreemptionByScheduler"), None
        ),
        case(
            "the deadline of a pod is not that of its job",
            failed(0, 143, "Preempted", reason="DeadlineExceeded"),
            "PodDeadlineExceeded",
        ),
        case("a pod that failed for no known reason still failed", make_pod(0, "Failed"), "PodFailed"),
        case("a deleted pod that saved its snapshot was deleted", failed(0, 143, "Preempted", **GOING), "PodDeleted"),
        case("a deleted pod that was killed was deleted", failed(0, 137, **GOING), "PodDeleted"),
        case("a deleted pod whose end the kubelet has lost was deleted", make_pod(0, "Failed", **GOING), "PodDeleted"),
        case("a deleted pod that ended with 1 and no word was deleted", failed(0, 1, **GOING), "PodDeleted"),
        case("a deleted pod whose peers had gone was deleted", failed(0, 1, "PeerLost", **GOING), "PodDeleted"),
        case("a deleted pod that raised, raised", failed(0, 1, "WorkerException", **GOING), "WorkerException"),
        case("a deleted pod that stalled, stalled", failed(0, 1, "Stalled", **GOING), "Stalled"),
        case(
            "a deleted pod with a user error has a user error",
            failed(0, 64, "ImportError", **GOING),
            "ImportError",
            Retry.NEVER,
        ),
        case(
            "what is never retried keeps its reason, whatever that is",
            failed(0, 64, "WorkerKilled", **GOING),
            "WorkerKilled",
            Retry.NEVER,
        ),
        case("a deleted pod within its grace has not failed yet", make_pod(**GOING), None),
        case("a deleted pod past its grace counts as gone", make_pod(**GONE), "PodDeleted"),
        case("one that never began was not deleted for what it did", make_pod(0, **NEVER_BEGAN), "Disrupted"),
        case("one whose init container ran may have been", make_pod(0, **NEVER_BEGAN | {"began": True}), "PodDeleted"),
    ],
)
def test_each_ending_has_one_reason(pod: PodView, reason: str | None, retry: Retry) -> None:
    failures = find_failures([pod], [], NOW)
    assert [failure.reason for failure in failures] == ([reason] if reason else [])
    assert all(failure.retry is retry for failure in failures)


@pytest.mark.parametrize("reason", ["UnexpectedAdmissionError", "TopologyAffinityError"])
def test_a_pod_that_ran_and_is_not_admitted_anew_was_on_a_node_that_was_restarted(reason: str) -> None:
    """The kubelet has started, and its device plugin has not registered yet."""
    refused = make_pod(0, "Failed", reason=reason, message="no healthy devices present")
    reasons = {ran: [one.reason for one in find_failures([refused], [], NOW, ran=ran)] for ran in (False, True)}
    assert reasons == {False: [reason], True: ["NodeRebooted"]}


def test_a_pod_that_is_missing_was_deleted() -> None:
    (failure,) = find_failures([], [("digits-0-1", 1)], NOW)
    assert (failure.reason, failure.pod_name, failure.node_rank) == ("PodDeleted", "digits-0-1", 1)
    assert failure.message == "digits-0-1 is no pod of the job any more: it was deleted, or its labels were"
    assert (failure.retry, failure.outside) == (Retry.YES, True)


@pytest.mark.parametrize(
    ("pod", "stopping"),
    [
        pytest.param(make_pod(), False, id="a pod that nobody deletes is not stopping"),
        pytest.param(make_pod(**GOING), True, id="within its grace a pod is stopping"),
        pytest.param(make_pod(deleting=True), True, id="without a known grace a pod is stopping"),
        pytest.param(make_pod(deleting=True, gone_by=later(-2.9)), True, id="the kubelet has a moment to report"),
        pytest.param(make_pod(**GONE), False, id="after that nobody waits for it"),
        pytest.param(failed(0, 143, "Preempted", **GOING), False, id="a pod that has ended is not stopping"),
    ],
)
def test_an_ending_is_waited_for_until_three_seconds_after_the_grace(pod: PodView, stopping: bool) -> None:
    assert is_stopping(pod, NOW) is stopping


def reasons(*pods: PodView, now: datetime = NOW, stopping: bool = False) -> str | None:
    cause = first_cause(find_failures(pods, [], now), now, stopping=stopping)
    return cause.reason if cause else None


@pytest.mark.parametrize(
    ("pods", "stopping", "reason"),
    [
        pytest.param([], False, None, id="no failure has no cause"),
        pytest.param(
            [failed(0, 1, "WorkerException", ago=0)], False, "WorkerException", id="a cause is acted on at once"
        ),
        pytest.param([failed(0, 1, "PeerLost", ago=1)], False, None, id="a consequence waits for its cause"),
        pytest.param([failed(0, 1, "PeerLost", ago=0)], False, None, id="and so does one of this moment"),
        pytest.param(
            [failed(0, 1, "RendezvousFailed", ago=1)], False, None, id="a failed rendezvous waits for its cause"
        ),
        pytest.param([failed(0, 1, "PeerLost", ago=3)], False, None, id="a lost peer may be done, and about to say so"),
        pytest.param([failed(0, 1, "PeerLost", ago=6)], False, "PeerLost", id="after six seconds it is the cause"),
        pytest.param(
            [failed(0, 1, "PeerLost", ago=-3600)], False, "PeerLost", id="a clock ahead of ours delays nothing"
        ),
        pytest.param([failed(0, 1, "PeerLost", ago=3600)], False, "PeerLost", id="a clock behind ours delays nothing"),
        pytest.param(
            [failed(0, 1, "PeerLost", ago=None)], False, "PeerLost", id="an end without a time delays nothing"
        ),
        pytest.param(
            [failed(0, 1, "PeerLost", ago=30, end_seen=later(-5))], False, None, id="one that was reported late waits"
        ),
        pytest.param(
            [failed(0, 1, "PeerLost", ago=30, end_seen=later(-6))],
            False,
            "PeerLost",
            id="six seconds after it was reported it is the cause",
        ),
        pytest.param(
            [failed(0, 1, "PeerLost", ago=-3600, end_seen=later(-1))],
            False,
            None,
            id="one that was seen waits whatever the clock of its node says",
        ),
        pytest.param(
            [failed(0, 1, "PeerLost", ago=9), failed(1, 137, ago=1)],
            False,
            "WorkerKilled",
            id="a late cause wins over an early consequence",
        ),
        pytest.param(
            [failed(0, 1, "PeerLost", ago=9), failed(1, 1, "PeerLost", ago=1)],
            False,
            None,
            id="the youngest consequence is waited for",
        ),
        pytest.param(
            [failed(0, 1, "WorkerException", ago=5), failed(1, 137, ago=8)],
            False,
            "WorkerKilled",
            id="of two causes the first in time is reported",
        ),
        pytest.param(
            [failed(0, 1, ago=None), failed(1, 137, ago=8)],
            False,
            "WorkerKilled",
            id="an end without a time comes after all that have one",
        ),
        pytest.param(
            [failed(1, 137, ago=8), failed(0, 1, ago=8)],
            False,
            "Failed",
            id="of two causes at one time the lower node rank is reported",
        ),
        pytest.param(
            [failed(0, 137, ago=8), failed(1, 64, "ImportError", ago=2)],
            False,
            "ImportError",
            id="what cannot be retried wins, whenever it happened",
        ),
        pytest.param([failed(0, 143, "Preempted", ago=1)], False, None, id="a preemption waits for its cause"),
        pytest.param(
            [failed(0, 143, "Preempted", ago=5), failed(1, 1, "PeerLost", ago=8)],
            False,
            "Preempted",
            id="a preemption explains a lost peer",
        ),
        pytest.param(
            [failed(0, 143, "Preempted", ago=5)],
            True,
            None,
            id="while a pod of the gang is stopping its peers' preemptions wait",
        ),
        pytest.param(
            [failed(0, 143, "Preempted", ago=5), failed(1, 143, "Preempted", ago=4, **GOING)],
            False,
            "PodDeleted",
            id="the pod that was deleted is why the whole gang was preempted",
        ),
        pytest.param(
            [failed(0, 143, "Preempted", ago=1), failed(1, 143, disruption="PreemptionByScheduler", ago=0, **GOING)],
            False,
            "Preempted",
            id="a pod that the scheduler preempted is a cause, and not waited for",
        ),
        pytest.param(
            [failed(0, 1, "WorkerException", ago=5)],
            True,
            "WorkerException",
            id="a cause does not wait for a pod that is stopping",
        ),
    ],
)
def test_a_cause_is_told_from_its_consequences(pods: list[PodView], stopping: bool, reason: str | None) -> None:
    assert reasons(*pods, stopping=stopping) == reason


def test_no_pod_is_stopping_unless_it_is_said() -> None:
    cause = first_cause(find_failures([failed(0, 143, "Preempted", ago=5)], [], NOW), NOW)
    assert cause is not None
    assert cause.reason == "Preempted"


@pytest.mark.parametrize("reported", ["soon", None, True, [1], float("nan"), 10**400], ids=repr)
def test_a_time_that_is_no_time_does_not_stop_the_choice_of_a_cause(reported: object) -> None:
    report = make_report("WorkerException", time=reported)
    assert reasons(make_pod(0, "Failed", termination=ended(1, report)), failed(1, 137)) in (
        "WorkerException",
        "WorkerKilled",
    )


def test_the_message_ends_with_the_last_lines_of_the_traceback() -> None:
    lines = "\n".join(f"line {number}" for number in range(40))
    pod = make_pod(0, "Failed", termination=ended(1, make_report("WorkerException", traceback=lines)))
    (failure,) = find_failures([pod], [], NOW)
    assert failure.message.splitlines() == ["it was WorkerException", *(f"line {number}" for number in range(28, 40))]


def test_what_the_message_has_already_is_not_said_again() -> None:
    report = make_report("WorkerException", message="rank 0 raised ValueError: no", exception="ValueError: no")
    (failure,) = find_failures([make_pod(0, "Failed", termination=ended(1, report))], [], NOW)
    assert failure.message == "rank 0 raised ValueError: no"


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        pytest.param(
            make_pod(0, "Failed", termination=ended(1, "no python here\n")),
            "pod digits-0-0 exited with code 1: no python here",
            id="what a container that is not ours has left",
        ),
        pytest.param(
            make_pod(0, "Failed", termination=ended(1, "a" * 9 + "b" * 500)),
            "pod digits-0-0 exited with code 1: " + "b" * 500,
            id="of a long text the end",
        ),
        pytest.param(
            make_pod(0, "Failed", **EVICTED),
            "pod digits-0-0 failed: The node was low on resource: memory.",
            id="the kubelet's words",
        ),
        pytest.param(
            make_pod(0, "Failed", reason="Terminated"), "pod digits-0-0 failed: Terminated", id="or its reason"
        ),
    ],
)
def test_the_message_says_what_is_known(pod: PodView, message: str) -> None:
    (failure,) = find_failures([pod], [], NOW)
    assert failure.message == message


def test_a_failure_carries_what_the_post_mortem_needs() -> None:
    report = make_report("WorkerKilled", rank=3, step=120)
    (failure,) = find_failures([make_pod(1, "Failed", termination=ended(1, report, ago=5))], [], NOW)
    assert (failure.pod_name, failure.node_name, failure.node_rank) == ("digits-0-1", "node-1", 1)
    assert (failure.rank, failure.step, failure.exit_code, failure.time) == (3, 120, 1, later(-5))


@pytest.mark.parametrize(
    ("pod", "signal"),
    [
        pytest.param(failed(0, 137), "SIGKILL", id="of a container that was killed"),
        pytest.param(failed(0, 139), "SIGSEGV", id="of a container that crashed"),
        pytest.param(make_pod(0, "Failed", termination=ended(1, signal=7)), "SIGBUS", id="as the runtime reports it"),
        pytest.param(
            make_pod(0, "Failed", termination=ended(1, make_report("WorkerKilled", signal="SIGABRT"))),
            "SIGABRT",
            id="of a rank, as the launcher reports it",
        ),
        pytest.param(
            make_pod(0, "Failed", termination=ended(150, make_report("WorkerException"))),
            None,
            id="an exit code that a script has chosen is no signal",
        ),
        pytest.param(
            make_pod(0, "Failed", termination=ended(1, make_report("WorkerKilled", signal="it hurt"))),
            None,
            id="what is no signal's name is none",
        ),
        pytest.param(failed(0, 129), "SIGHUP", id="of the first number"),
        pytest.param(failed(0, 191), None, id="a number that no signal has is none"),
        pytest.param(failed(0, 192), None, id="an exit code beyond the signals is none"),
        pytest.param(failed(0, 1), None, id="an exit code is none"),
    ],
)
def test_the_signal_is_known_by_its_name(pod: PodView, signal: str | None) -> None:
    (failure,) = find_failures([pod], [], NOW)
    assert failure.signal == signal


def test_only_an_end_that_the_runtime_has_forgotten_is_that_of_a_restarted_node() -> None:
    def end(message: str, reason: str) -> Failure | None:
        return end_of_restarted_node(make_pod(0, "Failed", termination=ended(255, message, reason=reason)))

    assert (found := end("", "Unknown")) is not None
    assert found.reason == "NodeRebooted"
    assert end(make_report(), "Unknown") is None
    assert end("", "Error") is None


def test_a_sidecar_that_goes_on_does_not_keep_a_node_from_having_succeeded() -> None:
    assert has_succeeded(make_pod(0, "Running", termination=ended(0)))
    assert not has_succeeded(make_pod(0, "Running"))


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        pytest.param(failed(0, 1), True, id="of a pod that left no message"),
        pytest.param(failed(0, 1, "WorkerException"), False, id="not of one that left a report"),
        pytest.param(make_pod(0, "Failed", **EVICTED), False, id="not of one that was ended from outside"),
    ],
)
def test_the_last_line_of_a_log_tells_what_the_trainer_could_not(pod: PodView, said: bool) -> None:
    (failure,) = find_failures([pod], [], NOW)
    reported = with_last_log_line(failure, "begin\npython: No module named 'ddp_trainer'\n\n")
    assert reported.message.endswith("; the log of the pod ends with: python: No module named 'ddp_trainer'") is said
    assert with_last_log_line(failure, " \n") == failure


def test_failures_are_values() -> None:
    assert Failure("A", "b", Retry.YES) == Failure("A", "b", Retry.YES)


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_causes_the_first_is_the_one_that_the_trainers_clocks_say_not_the_kubelets(first: int) -> None:
    """A kubelet gives whole seconds: two ends within one second, or on both sides of one, are in no order there."""
    pods = []
    for rank in (0, 1):
        at = later(-20).timestamp() + (0.9 if rank == first else 1.1)
        message = make_report("WorkerException", time=at, message=f"rank {rank}")
        # the other kubelet has rounded differently
        ago = 19.0 if rank == first else 20.0
        pods.append(make_pod(rank, "Failed", termination=ended(1, message, ago=ago)))
    cause = first_cause(find_failures(pods, [], NOW), NOW)
    assert cause is not None
    assert cause.node_rank == first


def test_a_rank_that_lost_a_peer_is_told_which_node_was_done() -> None:
    lost = failed(0, 1, "PeerLost", ago=6)
    (failure,) = find_failures([lost, succeeded(1)], [], NOW)
    assert failure.message.endswith("; node rank 1 had already finished its script")
    assert diagnose(failure).reason == "RankFinishedEarly"
    report = make_report("PeerLost", traceback="line 1\nline 2")
    (failure,) = find_failures([make_pod(0, "Failed", termination=ended(1, report)), succeeded(1)], [], NOW)
    assert failure.message == "it was PeerLost; node rank 1 had already finished its script\nline 1\nline 2"
    (alone,) = find_failures([lost, make_pod(1)], [], NOW)
    assert diagnose(alone).reason == "PeerLost"


def test_an_init_container_that_failed_is_the_reason_and_not_the_node() -> None:
    pod = make_pod(0, "Failed", init_failure=InitFailure("fetch", 3, "Error"))
    (failure,) = find_failures([pod], [], NOW)
    assert (failure.reason, failure.exit_code) == ("InitContainerFailed", 3)
    assert failure.message == "pod digits-0-0: init container fetch exited with code 3"
    diagnosis = diagnose(failure)
    assert "podTemplate" in diagnosis.advice
    assert not diagnosis.node_suspect


@pytest.mark.parametrize(("reason", "ends"), [("OOMKilled", "code 137 (OOMKilled)"), ("", "code 137")])
def test_an_init_container_that_failed_is_named_with_the_runtimes_reason(reason: str, ends: str) -> None:
    (failure,) = find_failures([make_pod(0, "Failed", init_failure=InitFailure("fetch", 137, reason))], [], NOW)
    assert failure.message.endswith(ends)


@pytest.mark.parametrize(("code", "reason"), [(255, "Unknown"), (137, "ContainerStatusUnknown")])
def test_a_node_that_came_back_without_an_init_container_was_restarted(code: int, reason: str) -> None:
    forgotten = InitFailure("fetch", code, reason)
    (failure,) = find_failures([make_pod(0, "Failed", init_failure=forgotten)], [], NOW)
    assert (failure.reason, failure.outside) == ("NodeRebooted", True)
    assert failure.message == "node node-0 was restarted, and pod digits-0-0 ended with it"
    (deleted,) = find_failures([make_pod(0, "Failed", init_failure=forgotten, deleting=True)], [], NOW)
    assert deleted.reason == "PodDeleted"


def test_what_ended_a_pod_from_outside_comes_before_its_init_container() -> None:
    evicted = make_pod(1, "Failed", reason="Evicted", init_failure=InitFailure("fetch", 137))
    (failure,) = find_failures([evicted], [], NOW)
    assert (failure.reason, failure.exit_code) == ("Evicted", None)
    assert (failure.pod_name, failure.node_name, failure.node_rank) == ("digits-0-1", "node-1", 1)


@pytest.mark.parametrize("words", ["Timed out waiting 2000ms for recv operation", "Operation timed out!"])
def test_a_collective_that_times_out_is_told_with_the_node_that_did_not(words: str) -> None:
    told = make_report("PeerLost", message=f"rank 0 raised RuntimeError: {words}")
    pods = [make_pod(rank, "Failed", termination=ended(1, told, ago=6)) for rank in (0, 2)]
    for failure in find_failures([*pods, make_pod(1)], [], NOW):
        assert failure.message.endswith(
            "; the ranks of node rank 1 did not time out: look there for one that did not join"
        )
        assert diagnose(failure).reason == "CollectiveTimeout"
    for failure in find_failures([*pods, make_pod(1), make_pod(3)], [], NOW):  # one of them may be about to
        assert "did not time out" not in failure.message


def test_a_disruption_is_said_in_the_words_of_who_caused_it() -> None:
    stopped = make_pod(0, disruption="WorkloadEvictedDueToLocalQueueStopped", **GONE)
    stopped = replace(stopped, disruption_message="The LocalQueue is stopped")
    (failure,) = find_failures([stopped], [], NOW)
    assert failure.message == (
        "pod digits-0-0 was disrupted: WorkloadEvictedDueToLocalQueueStopped: The LocalQueue is stopped"
    )


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            {
                "reason": "Evicted",
                "message": "Pod ephemeral local storage usage exceeds the total limit of containers 10Gi. ",
            },
            "StorageLimitExceeded",
        ),
        (EVICTED, "Evicted"),
        ({"reason": "Terminated"}, "Terminated"),
        ({"reason": "Preempting"}, "Preempting"),
        ({}, "NodeRebooted"),
        ({"deleting": True, "gone_by": later(30)}, "PodDeleted"),
        (GOING | EVICTED, "Evicted"),
    ],
)
def test_a_kubelet_that_ended_a_pod_may_have_lost_its_containers(said: dict[str, Any], reason: str) -> None:
    message = "The container could not be located when the pod was terminated"
    lost = ended(137, message, ago=None, reason="ContainerStatusUnknown")
    (failure,) = find_failures([make_pod(0, "Failed", termination=lost, **said)], [], NOW)
    assert failure.reason == reason
