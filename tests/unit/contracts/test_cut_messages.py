"""The kubelet divides 12 KiB among the containers of a pod: what the operator knows of messages that it has cut."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_trainer.launch.exit.root_cause import ExitCause, ExitEvidence
from ddp_trainer.launch.exit.termination_message import encode, message_of
from ddpjob_operator.core.failure.detect import Failure, Retry, find_failures, first_cause
from ddpjob_operator.core.failure.diagnosis import diagnose
from ddpjob_operator.core.values.observed import PodPhase, PodView, Termination
from ddpjob_operator.core.values.trainer_report import TerminationReport, read_termination

MOST_CONTAINERS = 17
NOW = datetime(2026, 1, 1, tzinfo=UTC)
TRACEBACK = "".join(
    f'  File "/opt/venv/lib/python3.11/site-packages/torch/nn/module_{number}.py", line {number}, in forward\n'
    for number in range(60)
)
METRICS = {f"accuracy_of_class_{number}": 0.5 for number in range(30)}


def written(cause: ExitCause, **progress: Any) -> bytes:
    """The trainer's message of a cause with a long traceback."""
    message = message_of(cause, None, ExitEvidence(wall=5.0, procs=1))
    return encode(message | {"attempt": 3, "metrics": METRICS, "traceback": TRACEBACK} | progress)


def cut(message: bytes, containers: int) -> str:
    """What the kubelet keeps (normalizeStatus); half a character becomes a replacement on the way to the operator."""
    return message[: 12 * 1024 // containers].decode(errors="replace")


def failures(containers: int, *causes: ExitCause) -> tuple[Failure, ...]:
    """Of a gang whose node ranks end of these causes, a second ago."""
    pods = [
        PodView(
            f"digits-0-{node_rank}", f"pod-{node_rank}", node_rank, 0, PodPhase.FAILED,
            termination=Termination(
                cause.exit_code, reason="Error", finished_at=NOW, message=cut(written(cause), containers)
            ),
        )
        for node_rank, cause in enumerate(causes)
    ]  # fmt: skip
    return find_failures(pods, [], NOW)


LOST_PEER = ExitCause(1, "PeerLost", "Connection closed by peer [10.0.0.7]:4711", rank=0, time=8.0)
RAISED = ExitCause(
    1, "WorkerException", "rank 1 raised ValueError after step 120: bad batch", rank=1, exception="ValueError", time=7.0
)


@pytest.mark.parametrize("containers", range(4, MOST_CONTAINERS + 1))
def test_what_the_operator_decides_by_is_there_in_a_pod_of_many_containers(containers: int) -> None:
    cause = ExitCause(1, "WorkerKilled", "rank 5 was killed by SIGKILL", rank=5, signal="SIGKILL", time=7.5)
    report = read_termination(cut(written(cause, step=120), containers))
    assert report is not None
    found = (report.reason, report.signal, report.rank, report.attempt, report.step, report.time, report.message)
    assert found == ("WorkerKilled", "SIGKILL", 5, 3, 120, 7.5, "rank 5 was killed by SIGKILL")


def test_the_metrics_and_the_beginning_of_the_traceback_are_there_in_a_pod_of_four_containers() -> None:
    report = read_termination(cut(written(RAISED), 4))
    assert report is not None
    assert (report.metrics, report.exception) == (METRICS, "ValueError")
    assert report.traceback[-1] == "…"
    assert report.traceback[1:-1] in TRACEBACK


def test_a_program_that_raises_is_at_fault_in_a_pod_of_four_containers_too() -> None:
    found = [diagnose(failures(containers, RAISED)[0]) for containers in (1, 4)]
    assert {(one.reason, one.deterministic, one.node_suspect) for one in found} == {("WorkerException", True, False)}


@pytest.mark.parametrize("containers", [1, 4])
def test_a_lost_peer_waits_for_its_cause_and_the_cause_is_found(containers: int) -> None:
    alone, both = failures(containers, LOST_PEER), failures(containers, LOST_PEER, RAISED)
    assert first_cause(alone, NOW) is None
    cause = first_cause(both, NOW)
    assert cause is not None
    assert (cause.pod_name, cause.reason) == ("digits-0-1", "WorkerException")


@pytest.mark.parametrize("containers", [1, 4, MOST_CONTAINERS])
def test_an_attempt_that_a_later_one_of_the_job_has_fenced_is_tried_again(containers: int) -> None:
    said = "attempt 2 (uid 0b0c) is fenced: attempt 5 (uid 0b0c) owns /mnt/shared/checkpoints/digits"
    (failure,) = failures(containers, ExitCause(77, "Fenced", said, rank=0))
    assert (failure.retry, failure.fenced_by) == (Retry.YES, 5)


def test_of_an_image_with_the_texts_first_the_fields_before_the_cut_are_read() -> None:
    whole = {"version": 1, "reason": "PeerLost", "message": "gone", "rank": 0, "attempt": 3, "traceback": "x" * 900}
    report = read_termination(json.dumps(whole | {"time": 5.0})[:600])
    assert report is not None
    assert (report.reason, report.message, report.rank, report.attempt) == ("PeerLost", "gone", 0, 3)
    assert report.time is None


texts = st.text(max_size=40) | st.sampled_from(["", "😀é" * 9, '"\\' * 9, "\x1b\n" * 9, "\ud800"])


@given(message=texts, traceback=texts, data=st.data())
def test_wherever_a_message_is_cut_no_field_becomes_another(message: str, traceback: str, data: st.DataObject) -> None:
    cause = ExitCause(1, "WorkerException", message, rank=12, exception=message, time=1234.5678)
    encoded = encode(message_of(cause, None, ExitEvidence(wall=5.0, procs=1)) | {"step": 345, "traceback": traceback})
    whole = read_termination(encoded.decode())
    assert whole is not None
    position = data.draw(st.integers(0, len(encoded)))
    found = read_termination(encoded[:position].decode(errors="replace"))
    if found is None:
        assert position <= encoded.index(b'"nodeRank"')
        return
    for name in TerminationReport.__dataclass_fields__:
        value, before = getattr(whole, name), getattr(found, name)
        is_beginning = isinstance(before, str) and before.endswith("…") and value.startswith(before[:-1])
        assert before in (value, None, "", {}) or is_beginning, name
