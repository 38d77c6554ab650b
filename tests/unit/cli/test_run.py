"""What `ddpjob run` prints when it begins, and at its end."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.support.local_run import new_job

from ddp_trainer.snapshots.trust.earlier import set_aside
from ddp_trainer.snapshots.trust.fence import Fence
from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Phase, Progress
from ddpjob_operator.cli.run import _conclude, _how_it_begins, _to_resume_from, run
from ddpjob_operator.local.runner import Outcome
from ddpjob_operator.submit.job import Submission

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("reported", "snapshot", "said"),
    [
        (None, None, "stopped before the first step; there is no snapshot yet: the same command starts from"),
        (7, None, "stopped at step 7; there is no snapshot yet"),
        (7, 5, "stopped at step 7; run the same command again to resume from step 5"),
        (7, 9, "stopped at step 9; run the same command again to resume from step 9"),
        (None, 9, "stopped at step 9; run the same command again to resume from step 9"),
    ],
)
def test_a_run_that_was_stopped_says_where_it_is_and_how_to_resume(
    reported: int | None, snapshot: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The snapshot that ranks save as they leave is newer than their last report."""
    status = DDPJobStatus(progress=Progress(step=reported) if reported else None)
    code = _conclude(new_job("digits", {}), Outcome(status, signal.SIGINT), None, snapshot)
    assert code == 130
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("snapshot", "said"),
    [
        (5, "stopped at step 7; run the command again with --resume (in place of --fresh) to resume from step 5"),
        (None, "stopped at step 7; there is no snapshot yet: the same command starts from the beginning"),
    ],
)
def test_the_same_command_would_begin_anew_once_more(
    snapshot: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run is a new job: with --fresh it sets aside what the one before has saved."""
    job = new_job("digits", {"snapshots": {"resume": "Own"}})
    _conclude(job, Outcome(DDPJobStatus(progress=Progress(step=7)), signal.SIGINT), None, snapshot)
    assert said in capsys.readouterr().out


def test_snapshots_of_before_are_none_to_resume_from_until_they_are_set_aside(tmp_path: Path) -> None:
    """A run may be stopped while its ranks still import torch."""
    checkpoints = tmp_path / "checkpoints" / "digits"
    (checkpoints / "step-000000000070").mkdir(parents=True)
    fresh = new_job("digits", {"snapshots": {"resume": "Own"}})
    assert _to_resume_from(tmp_path, new_job("digits", {})) == 70
    assert _to_resume_from(tmp_path, fresh) is None
    fence = Fence.acquire(checkpoints, created=1, attempt=0, uid=fresh.uid)
    set_aside(checkpoints, fence)
    assert _to_resume_from(tmp_path, fresh) is None
    (checkpoints / "step-000000000005").mkdir()
    assert _to_resume_from(tmp_path, fresh) == 5


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [
        ({"module": "ddp_trainer.train"}, "there is no snapshot yet: the same command starts from the beginning"),
        ({"module": "mine.train"}, "the same command starts the script again, which resumes if it loads"),
        ({"module": "ddp_trainer.call"}, "the same command starts the script again, which resumes if it loads"),
    ],
)
def test_a_program_of_ones_own_may_resume_without_a_snapshot(
    entrypoint: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = DDPJobStatus(progress=Progress(step=7))
    _conclude(new_job("digits", {"entrypoint": entrypoint}), Outcome(status, signal.SIGINT), None, None)
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("resume_from", "anew", "kept", "said"),
    [
        (None, False, None, []),
        (None, False, "shared/work/digits", []),
        (7, False, None, ["resuming from step 7; --fresh begins anew"]),
        (7, True, None, ["beginning anew; snapshots of before are set aside"]),
        (
            None,
            True,
            "shared/work/digits",
            [
                "note: shared/work/digits keeps what the script has written itself; one that resumes from it needs "
                "another --name"
            ],
        ),
    ],
)
def test_it_says_how_it_begins(resume_from: int | None, anew: bool, kept: str | None, said: list[str]) -> None:
    assert list(_how_it_begins(resume_from, anew=anew, kept=kept)) == said


def test_a_terminal_obeys_nothing_of_a_failure_and_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;title\x07\x1b[2Jgone"
    log = tmp_path / "pod.log"
    log.write_text(f"Traceback:\n\t{evil}\n")
    failure = FailureStatus(attempt=0, time=START, reason="Failed", message=f"{evil}\nnext", advice=evil)
    outcome = Outcome(DDPJobStatus(phase=Phase.FAILED, last_failure=failure), failed_log=log)
    assert _conclude(new_job("digits", {}), outcome, None, None) == 1
    shown = "]0;title[2Jgone"
    assert capsys.readouterr().err.splitlines() == [
        f"Failed: Failed: {shown}",
        "next",
        f"  {shown}",
        f"last lines of {log}:",
        "  Traceback:",
        f"  \t{shown}",
    ]


def test_a_terminal_obeys_nothing_of_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = new_job("digits", {"entrypoint": {"script": "/\x1b]0;title\x07.py"}})
    assert run(Submission(job, content={}), tmp_path, chaos=None) == 2
    assert "error: spec.entrypoint.script: /]0;title.py would be " in capsys.readouterr().err
