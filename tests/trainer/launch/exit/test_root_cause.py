"""Which exception means what, and which of several failures is the cause."""

from __future__ import annotations

import errno

import pytest
import torch

from ddp_trainer.contract.exit_codes import FencedError, Left, Preempted, UserError
from ddp_trainer.contract.outcomes import classify, is_of_machine, outcome_of
from ddp_trainer.launch.exit.root_cause import ExitEvidence, find_cause
from ddp_trainer.live.deciding import Excluded


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def exits(code: int | str, caught: BaseException) -> SystemExit:
    """In the handler of `caught`."""
    error = SystemExit(code)
    error.__context__ = caught
    return error


def exits_from_itself(code: int) -> SystemExit:
    """`except SystemExit as error: raise error from error`."""
    error = SystemExit(code)
    error.__cause__ = error
    return error


PEER_LOST = RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (ValueError("x"), (1, "WorkerException")),
        (UserError("x"), (64, "UserError")),
        (SyntaxError("x"), (64, "UserError")),
        (ModuleNotFoundError("x"), (64, "ImportError")),
        (FencedError("x"), (77, "Fenced")),
        (Preempted("x"), (143, "Preempted")),
        (SystemExit(), (0, "Completed")),
        (SystemExit(0), (0, "Completed")),
        (SystemExit(2), (64, "UserError")),
        (SystemExit(143), (143, "Preempted")),
        (SystemExit(-1), (255, "WorkerException")),
        (SystemExit(-9), (247, "WorkerKilled")),
        (SystemExit(192), (192, "WorkerKilled")),
        (SystemExit("text"), (1, "WorkerException")),
        (exits(1, PEER_LOST), (1, "PeerLost")),
        (exits(2, PEER_LOST), (1, "PeerLost")),
        (exits(3, torch.distributed.DistStoreError("wait timeout after 9ms, keys: /1")), (3, "RendezvousFailed")),
        (exits("training failed: Connection closed by peer", PEER_LOST), (1, "PeerLost")),
        (exits(1, ModuleNotFoundError("x")), (1, "WorkerException")),
        (exits(0, PEER_LOST), (0, "Completed")),
        (exits(137, PEER_LOST), (137, "WorkerKilled")),
        (exits(3, exits(1, PEER_LOST)), (3, "PeerLost")),
        (exits_from_itself(3), (3, "WorkerException")),
        (MemoryError(), (1, "OutOfMemory")),
        (torch.OutOfMemoryError("CUDA out of memory."), (1, "OutOfMemory")),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
            (1, "OutOfMemory"),
        ),
        (OSError(errno.ENOSPC, "No space left on device"), (1, "DiskFull")),
        (raised_from(RuntimeError("save failed"), OSError(errno.ENOSPC, "")), (1, "DiskFull")),
        (RuntimeError("PytorchStreamWriter failed: No space left on device"), (1, "DiskFull")),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41"), (1, "PeerLost")),
        (torch.distributed.DistBackendError("NCCL error: ncclRemoteError: remote process exited"), (1, "PeerLost")),
        (torch.distributed.DistNetworkError("recvValue failed: Connection reset by peer"), (1, "PeerLost")),
        (torch.distributed.DistBackendError("Operation timed out!"), (1, "PeerLost")),
        (torch.distributed.DistNetworkError("Connection timed out"), (1, "PeerLost")),
        (torch.distributed.DistNetworkError("No route to host"), (1, "PeerLost")),
        (RuntimeError("Connection timed out"), (1, "WorkerException")),
        (
            RuntimeError("Caught ConnectionClosedError in DataLoader worker process 0.\n…Connection was closed before"),
            (1, "WorkerException"),
        ),
        (RuntimeError("CAS service error : Error: connection closed"), (1, "WorkerException")),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), (1, "WorkerException")),
        (torch.distributed.DistNetworkError("The client socket has timed out after 60s"), (1, "RendezvousFailed")),
        (torch.distributed.DistStoreError("wait timeout after 300000ms, keys: /worker/1"), (1, "RendezvousFailed")),
    ],
    ids=lambda value: None if isinstance(value, tuple) else f"{type(value).__name__}-{value}"[:40],
)
def test_an_exception_means_one_exit_code_and_one_reason(error, verdict):
    assert classify(error) == verdict


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (PEER_LOST, True),
        (RuntimeError("Error(s) in loading state_dict for Linear: size mismatch for weight"), False),
        (KeyError("weight"), False),
        (UserError("CUDA error"), False),
    ],
)
def test_what_a_machine_has_done_is_not_taken_for_what_a_program_has(error, is_it):
    assert is_of_machine(error) == is_it


def record(rank, error, time):
    return outcome_of(error, rank=rank, local_rank=rank, pid=100 + rank) | {"time": time}


def failure(rank, code, time=50):
    return {"rank": rank, "localRank": rank, "pid": 100 + rank, "exitCode": code, "time": time}


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41"


@pytest.mark.parametrize(
    ("known", "code", "reason", "rank"),
    [
        ({"outcomes": [record(0, None, 1), record(1, None, 2)]}, 0, "Completed", None),
        ({"outcomes": [record(0, None, 1), record(1, Preempted(), 2)]}, 143, "Preempted", None),
        ({"outcomes": [record(0, None, 1), record(1, SystemExit(143), 2)]}, 1, "WorkerKilled", 1),
        ({"outcomes": [record(0, Preempted(), 1), record(1, SystemExit(143), 2)]}, 143, "Preempted", None),
        ({"outcomes": [record(0, SystemExit(143), 1), record(1, SystemExit(143), 2)], "stop_requested": True}, 143,
         "Preempted", None),
        ({"outcomes": [record(0, SystemExit(143), 1), record(1, SystemExit(143), 2)], "nodes": 2}, 143, "Preempted",
         None),
        ({"outcomes": [record(0, PEER_LOST, 1), record(1, SystemExit(143), 2)], "nodes": 2}, 1, "WorkerKilled", 1),
        ({"outcomes": [record(0, ValueError("x"), 2), record(1, SystemExit(143), 1)]}, 1, "WorkerException", 0),
        ({"outcomes": [record(0, PEER_LOST, 1), record(1, SystemExit(143), 2)], "stop_requested": True}, 143,
         "Preempted", None),
        ({"outcomes": [record(1, SystemExit(143), 2)], "stall": (0, "rank 0 …")}, 1, "WorkerKilled", 1),
        ({"failures": [failure(0, 143)]}, 1, "WorkerKilled", 0),
        ({"failures": [failure(0, 143)], "stop_requested": True}, 143, "Preempted", 0),
        ({"failures": [failure(0, 143)], "nodes": 2}, 143, "Preempted", 0),
        ({"outcomes": [record(0, None, 1), record(1, None, 2)], "stop_requested": True}, 143, "Preempted", None),
        ({"outcomes": [record(0, None, 1), record(1, None, 2)], "stop_requested": True, "stop_time": 3}, 0, "Completed",
         None),
        ({"outcomes": [record(0, None, 1), record(1, None, 4)], "stop_requested": True, "stop_time": 3}, 143,
         "Preempted", None),
        ({"agent_code": 0, "stop_requested": True, "stop_time": 3}, 143, "Preempted", None),
        ({"agent_code": 0, "outcomes": [record(0, None, 1)], "stop_requested": True, "stop_time": 3}, 143, "Preempted",
         None),
        ({"outcomes": [record(0, PEER_LOST, 1), record(1, ValueError("x"), 2)]}, 1, "WorkerException", 1),
        ({"outcomes": [record(0, ValueError("x"), 2), record(1, UserError("x"), 1)]}, 64, "UserError", 1),
        ({"outcomes": [record(0, PEER_LOST, 1)], "failures": [failure(0, 1), failure(1, -9)]}, 1, "WorkerKilled", 1),
        ({"outcomes": [record(0, exits(3, PEER_LOST), 1)], "failures": [failure(1, -9)]}, 1, "WorkerKilled", 1),
        ({"outcomes": [record(0, SystemExit("x"), 1)], "failures": [failure(1, -9)], "stderr": {0: [LOST]}}, 1,
         "WorkerKilled", 1),
        ({"outcomes": [record(0, SystemExit("x"), 1)], "failures": [failure(1, -9)]}, 1, "WorkerException", 0),
        ({"outcomes": [record(0, Excluded("x"), 1)], "failures": [failure(1, -9)]}, 1, "WorkerKilled", 1),
        ({"outcomes": [record(0, Excluded("x"), 1)], "failures": [failure(1, -15)]}, 1, "WorkerException", 0),
        ({"failures": [failure(0, -15), failure(1, -11)]}, 1, "WorkerKilled", 1),
        ({"failures": [failure(0, -9), failure(1, -9)], "oom_killed": True}, 1, "OutOfMemory", 0),
        ({"failures": [failure(0, -15)]}, 1, "WorkerKilled", 0),
        ({"failures": [failure(0, -15)], "stop_requested": True}, 143, "Preempted", None),
        ({"failures": [failure(0, -9)], "stop_requested": True, "killed": frozenset({100})}, 143, "Preempted", None),
        ({"failures": [failure(0, -9)], "stop_requested": True}, 1, "WorkerKilled", 0),
        ({"outcomes": [record(0, OSError(errno.ENOSPC, ""), 1)], "stop_requested": True}, 1, "DiskFull", 0),
        ({"outcomes": [record(0, PEER_LOST, 1)], "stop_requested": True}, 143, "Preempted", None),
        ({"failures": [failure(1, -6)], "stderr": {1: ["NCCL communicator was aborted"]}}, 1, "PeerLost", 1),
        ({"failures": [failure(1, 77)]}, 77, "Fenced", 1),
        ({"rendezvous_error": "timed out", "started": 0}, 1, "RendezvousFailed", None),
        ({"rendezvous_error": "closed", "failures": [failure(0, -15)]}, 1, "PeerLost", None),
        ({"agent_code": -9}, 1, "WorkerKilled", None),
        ({"agent_code": 1}, 1, "WorkerException", None),
        ({"stall": (1, "rank 1 …"), "outcomes": [record(0, PEER_LOST, 1)]}, 1, "Stalled", 1),
    ],
)  # fmt: skip
def test_the_cause_is_the_earliest_failure_that_is_no_consequence_of_another(known, code, reason, rank):
    evidence = ExitEvidence(**{"wall": 100.0, "procs": 2, "started": 2, "agent_code": 1} | known)
    cause = find_cause(evidence)
    assert (cause.exit_code, cause.reason, cause.rank) == (code, reason, rank)


def test_an_exception_without_a_message_is_named_once():
    evidence = ExitEvidence(wall=1.0, procs=2, started=2, agent_code=1, outcomes=[record(1, AssertionError(), 1)])
    assert find_cause(evidence).message == "rank 1 raised AssertionError"


def test_a_script_that_leaves_for_a_lost_peer_says_so_whatever_it_has_printed():
    evidence = ExitEvidence(wall=1.0, procs=2, started=2, agent_code=1, outcomes=[record(1, exits(3, PEER_LOST), 1)])
    assert find_cause(evidence).message == (
        "rank 1 exited with code 3 on RuntimeError: Connection closed by peer; it printed nothing on stderr"
    )


def test_a_rank_that_the_launcher_killed_was_not_killed_by_others():
    evidence = ExitEvidence(
        wall=1.0, procs=2, started=2, agent_code=1, failures=[failure(0, -9)], killed=frozenset({100})
    )
    assert find_cause(evidence).message.startswith("rank 0 was killed by SIGKILL by the launcher, since it did not")


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        pytest.param({"started": 0, "agent_code": -9}, "Left", id="no rank had started"),
        pytest.param({"failures": [failure(0, -15), failure(1, -15)]}, "Left", id="before the ranks listened"),
        pytest.param({"failures": [failure(0, -9)], "killed": frozenset({100})}, "Left", id="in a long step"),
        pytest.param({"outcomes": [record(0, Left(), 1), record(1, Left(), 2)]}, "Left", id="after a step"),
        pytest.param({"outcomes": [record(0, PEER_LOST, 1)]}, "Left", id="with a lost peer"),
        pytest.param({"outcomes": [record(0, Preempted(), 1), record(1, Preempted(), 2)]}, "Preempted", id="all ranks"),
        pytest.param({"outcomes": [record(1, Preempted(), 1)], "failures": [failure(0, -9)], "killed": {100}},
                     "Preempted", id="all ranks, and one was slow"),
    ],
)  # fmt: skip
def test_a_live_pod_that_was_stopped_has_left_unless_its_ranks_say_that_all_stop(known, reason):
    evidence = ExitEvidence(
        **{"wall": 100.0, "procs": 2, "started": 2, "agent_code": 1, "stop_requested": True, "live": True} | known
    )
    cause = find_cause(evidence)
    assert (cause.exit_code, cause.reason) == (143, reason)


@pytest.mark.parametrize(
    ("rank", "snapshot", "saved"),
    [
        (0, None, "; there is no snapshot"),
        (0, {"step": 10}, "; the snapshot of step 10 is saved"),
        (2, {"step": 12}, "; the snapshot of step 12 is saved"),
        (2, None, ""),
    ],
)
def test_only_the_pod_of_rank_0_says_that_there_is_no_snapshot(rank, snapshot, saved):
    beat = {"rank": rank, "localRank": 0, "phase": "train", "step": 12, "snapshot": snapshot}
    known = {"failures": [failure(rank, -15)], "stop_requested": True, "heartbeats": [beat]}
    cause = find_cause(ExitEvidence(wall=100, procs=1, nodes=3, started=1, **known))
    assert cause.message == f"stopped by SIGTERM after step 12{saved}"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (137, "exited with code 137 (128 + SIGKILL,"),
        (192, "exited with code 192 (128 + SIGRTMAX,"),
        (247, "exited with code 247 (256 - SIGKILL,"),
        (255, "exited with code 255 without"),
    ],
)
def test_an_exit_code_that_stands_for_a_signal_is_given_with_it(code, words):
    assert words in find_cause(ExitEvidence(100.0, 1, started=1, agent_code=1, failures=[failure(0, code)])).message


TIMED_OUT = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation")


@pytest.mark.parametrize("error", [TIMED_OUT, RuntimeError("Operation timed out!")])
@pytest.mark.parametrize(("nodes", "rank"), [(1, 2), (2, 0)])
def test_the_rank_that_did_not_time_out_is_blamed_only_if_all_ranks_of_the_gang_are_known(nodes, rank, error):
    evidence = ExitEvidence(
        wall=100.0,
        procs=3,
        nodes=nodes,
        started=3,
        agent_code=1,
        outcomes=[record(0, error, 1), record(1, error, 2)],
        failures=[failure(2, -15)],
    )
    cause = find_cause(evidence)
    assert (cause.reason, cause.rank) == ("PeerLost", rank)
    assert ("did not join" in cause.message) == (nodes == 1)


def test_a_rank_that_finished_before_sigterm_came_has_succeeded():
    heartbeat = {"rank": 0, "localRank": 0, "phase": "done", "step": 400, "totalSteps": 400, "metrics": {}}
    evidence = ExitEvidence(
        wall=1.0, procs=1, started=1, outcomes=[record(0, None, 1)], heartbeats=[heartbeat], stop_requested=True
    )
    assert find_cause(evidence).exit_code == 0


@pytest.mark.parametrize(("total", "code"), [(400, 143), (None, 143), (7, 0)])
def test_a_script_that_exits_from_its_own_handler_of_sigterm_has_not_succeeded(total, code):
    heartbeat = {"rank": 0, "localRank": 0, "phase": "done", "observed": True, "step": 7, "totalSteps": total}
    evidence = ExitEvidence(
        wall=1.0,
        procs=1,
        started=1,
        outcomes=[record(0, None, 1)],
        heartbeats=[heartbeat | {"metrics": {}, "snapshot": None}],
        stop_requested=True,
    )
    assert find_cause(evidence).exit_code == code


@pytest.mark.parametrize(("total", "code"), [(400, 143), (None, 143), (0, 143), (-1, 143), (7, 0)])
def test_a_rank_that_was_stopped_has_succeeded_only_after_all_its_steps(total, code):
    heartbeat = {"rank": 0, "localRank": 0, "phase": "train", "step": 7, "totalSteps": total, "metrics": {}}
    evidence = ExitEvidence(
        wall=1.0, procs=1, started=1, outcomes=[record(0, None, 1)], heartbeats=[heartbeat], stop_requested=True
    )
    assert find_cause(evidence).exit_code == code
