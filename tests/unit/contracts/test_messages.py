"""Real messages of NCCL, gloo, CUDA and others, from a rank's stderr or exception to reason, blame and advice."""

from __future__ import annotations

import builtins
import os
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_trainer.contract.outcomes import outcome_of
from ddp_trainer.contract.run_dir import stderr_pipe
from ddp_trainer.launch.exit.root_cause import ExitCause, ExitEvidence, find_cause
from ddp_trainer.launch.exit.termination_message import encode, message_of
from ddp_trainer.launch.pod import AfterAttempt, after_attempt
from ddp_trainer.launch.relay import StderrRelay
from ddp_trainer.launch.supervisor import AttemptResult
from ddpjob_operator.core.failure.detect import Failure, find_failures
from ddpjob_operator.core.failure.diagnosis import diagnose
from ddpjob_operator.core.values.observed import PodPhase, PodView, Termination
from ddpjob_operator.wire.objects import parse_time

MESSAGES = tomllib.loads(Path(__file__).with_name("messages.toml").read_text())["message"]

THREADS = 12
DUMP = "".join(
    f"Thread 0x00007f{number:010x} (most recent call first):\n"
    '  File "/usr/lib/python3.11/threading.py", line 324 in wait\n'
    '  File "/usr/lib/python3.11/threading.py", line 622 in wait\n'
    "  <no Python frame>\n\n"
    for number in range(THREADS)
)
"""faulthandler's, of a process with the threads of a DataLoader and of torch."""


def dump(name: str) -> str:
    what = {"SIGABRT": "Aborted", "SIGSEGV": "Segmentation fault"}[name]
    current = (
        'Current thread 0x00007f0000000001 (most recent call first):\n  File "/workspace/train.py", line 7 in step\n'
    )
    return f"Fatal Python error: {what}\n\n{DUMP}{current}\nExtension modules: numpy.core, torch._C (total: 2)\n"


def exception(entry: dict[str, Any]) -> BaseException:
    name, text = entry.get("raises", "RuntimeError"), entry["text"].strip()
    if name == "OutOfMemoryError":
        return torch.OutOfMemoryError(text)
    kind: type[BaseException] = getattr(builtins, name, None) or getattr(torch.distributed, name)
    return kind(text)


@pytest.fixture
def relay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[StderrRelay]:
    found = StderrRelay(tmp_path, 0)
    yield found
    found.close()


def printed(relay: StderrRelay, text: str, tmp_path: Path) -> list[str]:
    """What a relay keeps of a rank's stderr, written in pieces as ranks do."""
    writer = os.open(stderr_pipe(tmp_path, 0), os.O_WRONLY)
    for line in text.lstrip("\n").splitlines(keepends=True):
        os.write(writer, line.encode())
        relay.relay()
    os.close(writer)
    relay.drain()
    return relay.last_lines


def cause_of(entry: dict[str, Any], relay: StderrRelay, tmp_path: Path) -> tuple[ExitCause, ExitEvidence]:
    ends = entry["ends"]
    if ends == "exception":
        outcome = outcome_of(exception(entry), rank=0, local_rank=0, pid=71)
        evidence = ExitEvidence(wall=0.0, procs=1, outcomes=[outcome], started=1, agent_code=1)
        return find_cause(evidence), evidence
    exited = ends.startswith("exit ")
    code = int(ends.removeprefix("exit ")) if exited else -signal.Signals[ends].value
    text = entry["text"] if exited else entry["text"] + "\n" + dump(ends)
    failure = {"rank": 0, "localRank": 0, "pid": 71, "exitCode": code, "time": 5.0}
    evidence = ExitEvidence(
        wall=0.0,
        procs=1,
        failures=[failure],
        started=1,
        agent_code=1,
        stderr={0: printed(relay, text, tmp_path)},
    )
    return find_cause(evidence), evidence


def seen_by_the_operator(cause: ExitCause, evidence: ExitEvidence) -> Failure:
    now = parse_time("2026-01-01T00:00:00Z")
    assert now is not None
    message = encode(message_of(cause, None, evidence)).decode()
    ended = Termination(cause.exit_code, reason="Error", finished_at=now, message=message)
    pod = PodView("digits-0-0", "pod", 0, 0, PodPhase.FAILED, termination=ended)
    (failure,) = find_failures([pod], [], now)
    return failure


@pytest.mark.parametrize("entry", MESSAGES, ids=lambda entry: entry["name"])
def test_a_message_has_its_reason_its_blame_and_its_advice(
    entry: dict[str, Any], relay: StderrRelay, tmp_path: Path
) -> None:
    cause, evidence = cause_of(entry, relay, tmp_path)
    found = diagnose(seen_by_the_operator(cause, evidence))
    waits = after_attempt(AttemptResult(cause, evidence), stopped=False, stays=True) is AfterAttempt.WAIT
    judged = (found.deterministic, found.node_suspect)
    blame = {(True, True): "program or node", (True, False): "program", (False, True): "node"}.get(judged, "nobody")
    made = {"reason": found.reason, "blame": "peer" if waits else blame, "waits": waits}
    assert made == {name: entry[name] for name in made}
    assert entry["advice"] in found.advice


def test_of_a_dump_only_the_frames_of_the_thread_that_crashed_are_kept(relay: StderrRelay, tmp_path: Path) -> None:
    assert printed(relay, "double free or corruption\n" + dump("SIGABRT"), tmp_path) == [
        "double free or corruption",
        "Fatal Python error: Aborted",
        'File "/workspace/train.py", line 7 in step',
    ]


def test_telling_lines_outlive_a_flood_of_others(relay: StderrRelay, tmp_path: Path) -> None:
    telling = "[rank0]:[E ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(1)"
    flood = "".join(f"epoch 3: {number} samples\n" for number in range(1000))
    lines = printed(relay, f"{telling}\n{flood}", tmp_path)
    assert lines[0] == telling
    assert lines[-1] == "epoch 3: 999 samples"
