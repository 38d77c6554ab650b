"""What a failure's cause means: what to do about it, and whom it speaks against."""

from __future__ import annotations

import pytest
from builders import DEFAULTS, NOW, failed, in_phase, make_job, make_pod, seen

from ddpjob_operator.api import reasons
from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.failure.detect import Failure, Retry
from ddpjob_operator.core.failure.diagnosis import ADVICE, advice_for, diagnose
from ddpjob_operator.core.plan import plan


@pytest.mark.parametrize("reason", sorted(ADVICE))
def test_advice_is_one_line_that_ends_like_a_sentence(reason: str) -> None:
    assert advice_for(reason).endswith(".")
    assert "\n" not in advice_for(reason)


def test_there_is_advice_for_every_reason_that_the_launcher_gives() -> None:
    given = ("UserError", "ImportError", "Fenced", "WorkerKilled", "WorkerException", "PeerLost", "RendezvousFailed")
    assert all(advice_for(reason) for reason in (*given, "Stalled", "OutOfMemory", "DiskFull", "Preempted"))
    assert advice_for("NobodyKnows") == ""


def test_the_advice_for_a_drain_and_for_an_eviction_differ() -> None:
    assert "maintenance" in advice_for("Drained")
    assert "resources.requests" not in advice_for("Drained")
    assert "resources.requests" in advice_for("Evicted")


def test_a_preempted_pod_may_have_been_killed_before_it_saved_a_snapshot() -> None:
    assert "saved" not in advice_for("Preempted")


def test_an_image_without_the_trainer_is_known_by_the_last_line_of_its_pods_log() -> None:
    pods = (failed(0, 1), make_pod(1))
    log = "/usr/bin/python: Error while finding module specification for 'ddp_trainer.launch' (ModuleNotFoundError: No "
    log += "module named 'ddp_trainer')\n"
    decided = plan(make_job(in_phase(Phase.RUNNING)), seen(*pods, logs={pods[0].uid: log}), NOW, DEFAULTS)
    failure = decided.status.last_failure
    assert failure is not None
    assert failure.reason == "TrainerMissing"
    assert failure.message.startswith("pod digits-0-0 exited with code 1; the log of the pod ends with: /usr/bin")
    assert "trainer image" in failure.advice


@pytest.mark.parametrize(("step", "deterministic"), [(None, False), (0, False), (7, True)])
def test_a_stall_before_the_first_step_may_be_the_surroundings(step: int | None, deterministic: bool) -> None:
    assert diagnose(Failure("Stalled", "", Retry.YES, step=step)).deterministic is deterministic


@pytest.mark.parametrize(
    ("reason", "signal", "deterministic", "node_suspect"),
    [
        pytest.param("WorkerException", None, True, False, id="an exception is the program's"),
        pytest.param("OOMKilled", "SIGKILL", True, False, id="so is memory above the container's limit"),
        pytest.param("WorkerKilled", "SIGSEGV", True, True, id="a crash is the program's or the node's"),
        pytest.param("WorkerKilled", "SIGKILL", False, True, id="a kill is the node's"),
        pytest.param("WorkerKilled", None, False, True, id="so is one by an unknown signal"),
        pytest.param("NodeLost", None, False, True, id="a lost node is the node's"),
        pytest.param("PeerLost", None, False, False, id="a lost peer is nobody's"),
        pytest.param("PodDeleted", None, False, False, id="a deletion is a person's"),
        pytest.param("DiskFull", None, False, False, id="a full volume is nobody's"),
        pytest.param("Failed", None, False, True, id="an end without a word may be the node's"),
        pytest.param("NobodyKnows", None, False, False, id="a reason that nobody knows is held against nobody"),
    ],
)
def test_a_reason_speaks_against_the_program_the_node_or_neither(
    reason: str, signal: str | None, deterministic: bool, node_suspect: bool
) -> None:
    found = diagnose(Failure(reason, "", Retry.YES, signal=signal))
    assert (found.deterministic, found.node_suspect) == (deterministic, node_suspect)


OF_THE_PROGRAM = frozenset([
    "AccessDenied", "CUDANotInImage", "CollectiveMismatch", "DataCorrupted", "ImportError", "LossNotFinite",
    "NotDeterministic", "OOMKilled", "OutOfMemory", "PermissionDenied", "ProcessGroupInit", "RankFinishedEarly",
    "ReadOnlyFileSystem", "SharedMemoryFull", "TooFewGPUs", "TooManyOpenFiles", "TooManyThreads", "TrainerMissing",
    "UnsafeFile", "UnusedParameters", "UserError", "WorkerException",
])  # fmt: skip
OF_THE_NODE = frozenset([
    "ContainerCannotRun", "DriverMismatch", "Evicted", "Failed", "GPUFault", "GPUMissing", "NCCLError", "NodeLost",
    "PodFailed", "StartError", "TopologyAffinityError", "UnexpectedAdmissionError", "WorkerKilled",
])  # fmt: skip
OF_EITHER = frozenset(["CUDAError", "Stalled"])
OF_NEITHER = frozenset([
    "AddressInUse", "CollectiveTimeout", "DataWorkerDied", "DeviceTainted", "DiskFull", "Disrupted", "Drained", "Error",
    "Fenced", "FetchFailed", "InitContainerFailed", "Left", "LiveRecoveryFailed", "NetworkError", "NodeAffinity",
    "NodePorts", "NodeRebooted", "NodeShutdown", "NodeTainted", "OutOfResource", "OutOfcpu", "OutOfmemory", "OutOfpods",
    "PeerLost", "PodDeadlineExceeded", "PodDeleted", "Preempted", "Preempting", "RendezvousFailed", "RunContainerError",
    "Shutdown", "StatusRestored", "StorageLimitExceeded", "Terminated", "Unknown", "VolumeAttachmentLimitExceeded",
    "VolumeError", "VolumeFailed",
])  # fmt: skip


def test_each_reason_speaks_against_the_program_or_the_node_or_either_or_neither() -> None:
    """Of a failure in step 7 without a message: words in one, its signal and its step may say more."""
    found = {row.name: diagnose(Failure(row.name, "", Retry.YES, step=7)) for row in reasons.FAILURES}
    judged = {name: (one.deterministic, one.node_suspect) for name, one in found.items()}
    assert judged == {
        **dict.fromkeys(OF_THE_PROGRAM, (True, False)),
        **dict.fromkeys(OF_THE_NODE, (False, True)),
        **dict.fromkeys(OF_EITHER, (True, True)),
        **dict.fromkeys(OF_NEITHER, (False, False)),
    }
