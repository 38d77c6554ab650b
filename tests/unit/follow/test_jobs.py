"""`ddpjob ls` and `ddpjob get`: DDPJobs as rows and as a summary, on terminals of any width."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ddpjob_operator.follow.jobs import job_table, newest_first, summary_lines
from ddpjob_operator.follow.table import printable

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)


def job(name: str, minutes_old: int, phase: str | None = "Running", **more: Any) -> dict[str, Any]:
    created, ends = NOW - timedelta(minutes=minutes_old), NOW + timedelta(seconds=200)
    status = {
        "phase": phase,
        "summary": {"nodes": "2/2", "progress": "412/1000", "reason": "AllNodesReady"},
        "nodes": {"ready": 2, "total": 2},
        "startTime": created.isoformat(),
        "progress": {
            "step": 412,
            "totalSteps": 1000,
            "loss": 0.0312,
            "eta": ends.isoformat(),
        },
        "snapshot": {"step": 400, "time": (NOW - timedelta(minutes=1)).isoformat(), "verified": True},
        "goodput": {"ratio": 0.913},
    }
    return {
        "metadata": {"name": name, "namespace": "ml", "creationTimestamp": created.isoformat()},
        "spec": {"nodes": 2, "procsPerNode": 4, **more.pop("spec", {})},
        "status": status | more if phase else {},
    }


JOBS = [
    job("old", 600, "Failed", summary={"nodes": "0/2", "progress": "412/1000", "reason": "BackoffLimitExceeded"}),
    job("digits", 12),
    job("new", 1, None),
]


def test_the_newest_job_is_first_and_those_that_ended_are_marked() -> None:
    heading, rows = job_table(newest_first(JOBS), NOW)
    assert heading == "NAME     PHASE     NODES   PROGRESS   ETA     RESTARTS   REASON                 AGE"
    assert [(row.line, row.over) for row in rows] == [
        ("new                                           0                                 60s", False),
        ("digits   Running   2/2     412/1000   3m20s   0          AllNodesReady          12m", False),
        ("old      Failed    0/2     412/1000           0          BackoffLimitExceeded   10h", True),
    ]


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (80, "NAME PHASE PROGRESS ETA RESTARTS REASON AGE"),
        (60, "NAME PHASE PROGRESS REASON AGE"),
        (40, "NAME PHASE PROGRESS AGE"),
        (10, "NAME PHASE"),
    ],
)
def test_a_narrow_terminal_gets_the_columns_that_matter_most(width: int, headings: str) -> None:
    heading, _ = job_table(newest_first(JOBS), NOW, width=width)
    assert " ".join(heading.split()) == headings


def test_wide_and_all_namespaces_add_columns() -> None:
    heading, rows = job_table(
        [job("digits", 12, spec={"scheduling": {"queue": "team"}})], NOW, wide=True, namespaces=True
    )
    assert dict(zip(heading.split(), rows[0].line.split(), strict=False))["NAMESPACE"] == "ml"
    assert heading.endswith("ATTEMPT   LOSS     ACCURACY   GOODPUT   SNAPSHOT   QUEUE")
    assert rows[0].line.split()[-5:] == ["0", "0.0312", "91%", "400", "team"]


def test_a_job_that_is_being_deleted_says_so() -> None:
    ending = job("digits", 12)
    ending["metadata"]["deletionTimestamp"] = NOW.isoformat()
    assert "Terminating" in job_table([ending], NOW)[1][0].line
    assert summary_lines(ending, NOW)[0] == "digits: Terminating"


def test_the_summary_has_what_a_person_asks_first() -> None:
    failure = {"attempt": 0, "time": NOW.isoformat(), "podName": "digits-0-1", "reason": "OOMKilled", "message": "137",
               "advice": "Raise the memory limit."}  # fmt: skip
    said = summary_lines(job("digits", 12, lastFailure=failure, restarts=1), NOW)
    assert said == [
        "digits: Running (AllNodesReady)",
        "  Namespace  ml",
        "  Created    2030-01-01 11:48:00 UTC, 12m ago",
        "  Time       12m00s so far",
        "  Nodes      2 of 2 ready, 4 ranks each",
        "  Progress   step 412/1000 (41%), loss 0.0312, 3m20s left",
        "  Snapshot   snapshot of step 400, verified, 60s ago",
        "  Goodput    91% of the time",
        "  Attempt    0, restarts 1, disruptions 0",
        "  Program    built-in trainer",
        "  Volume     claim digits-shared, kept when the job is deleted",
        "  Failure    OOMKilled on digits-0-1: 137",
        "  Advice     Raise the memory limit.",
    ]


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        ({"procsPerNode": None}, "1 rank each"),
        ({"procsPerNode": None, "resources": {"limits": {"nvidia.com/gpu": 8}}}, "8 ranks each"),
        ({"procsPerNode": None, "resources": {"limits": {"amd.com/gpu": "2", "cpu": "4"}}}, "2 ranks each"),
        ({"procsPerNode": 1, "resources": {"limits": {"nvidia.com/gpu": 8}}}, "1 rank each"),
    ],
)
def test_the_summary_counts_a_rank_for_each_gpu(spec: dict[str, Any], ranks: str) -> None:
    assert f"  Nodes      2 of 2 ready, {ranks}" in summary_lines(job("digits", 12, spec=spec), NOW)


@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
def test_the_summary_says_that_the_loss_is_not_finite(phase: str) -> None:
    said = "the loss is NaN or infinite since step 12"
    found = {"type": "LossNotFinite", "status": "True", "reason": "NonFiniteLoss", "message": said,
             "lastTransitionTime": NOW.isoformat()}  # fmt: skip
    assert f"  Condition  LossNotFinite: NonFiniteLoss: {said}" in summary_lines(
        job("digits", 12, phase, conditions=[found]), NOW
    )


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        ({"retain": False}, "claim digits-shared, deleted with the job"),
        ({"claimName": "mine", "retain": False}, "claim mine, which is yours"),
    ],
)
def test_the_summary_says_what_becomes_of_the_volume(shared: dict[str, Any], words: str) -> None:
    assert f"  Volume     {words}" in summary_lines(job("digits", 1, spec={"shared": shared}), NOW)


def test_the_summary_says_what_is_run_and_which_code() -> None:
    spec = {
        "entrypoint": {"script": "train.py"},
        "args": ["--name", "my run"],
        "code": {"sha256": "0123456789abcdef" * 4},
    }
    said = summary_lines(job("digits", 1, spec=spec), NOW)
    assert "  Program    train.py --name 'my run'" in said
    assert "  Code       0123456789ab; ddpjob code digits gets it back" in said
    assert "  Program    -m my.train" in summary_lines(job("d", 1, spec={"entrypoint": {"module": "my.train"}}), NOW)


def test_no_line_of_a_summary_is_wider_than_the_terminal() -> None:
    lines = summary_lines(job("digits", 12, spec={"image": f"ghcr.io/{'long/' * 5}image:1"}), NOW, width=40)
    assert max(map(len, lines)) <= 40
    assert any(line.startswith(" " * 13) for line in lines)


def test_what_a_job_says_cannot_change_the_terminal() -> None:
    assert printable("red \x1b[31m\nnext\tline") == "red [31m next line"
    reason = {"reason": "\x1b]0;title\x07"}
    assert "\x1b" not in job_table([job("digits", 1, summary=reason)], NOW)[1][0].line
