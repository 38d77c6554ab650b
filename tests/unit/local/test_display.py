"""What a person reads during a run."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Phase, Progress, SnapshotStatus
from ddpjob_operator.core.values.actions import Event
from ddpjob_operator.local.display import LiveDisplay, PlainDisplay, display_for, picture
from ddpjob_operator.local.observed import (
    NodeView,
    RunView,
    progress_in_words,
    seconds_in_words,
    sparkline,
    success_in_words,
)

START = datetime(2026, 1, 1, tzinfo=UTC)


def view(step: int = 0, *, total: int | None = 100, seconds: float = 0.0, loss: float = 0.25, **status: Any) -> RunView:
    progress = Progress(epoch=1, step=step, total_steps=total, loss=loss)
    node = NodeView(0, "digits-1-0", "Running", 71, step, "train", Path("shared/logs/digits/pods/digits-1-0.log"))
    return RunView(
        job="digits",
        status=DDPJobStatus(phase=Phase.RUNNING, attempt=1, restarts=1, progress=progress, **status),
        nodes=(node,),
        started=START,
        now=START + timedelta(seconds=seconds),
    )


def lines(*views: RunView) -> list[str]:
    stream = io.StringIO()
    with PlainDisplay(stream) as display:
        for each in views:
            display.show(each)
    return stream.getvalue().splitlines()


def test_a_run_is_ten_lines_of_progress_however_often_it_is_looked_at() -> None:
    assert len(lines(*(view(step) for step in range(101) for _ in range(3)))) == 10


def test_a_long_step_shows_a_line_each_half_minute() -> None:
    assert len(lines(*(view(7, total=None, seconds=second) for second in range(91)))) == 3


def test_steps_that_are_made_again_after_a_restart_are_not_shown_again() -> None:
    assert len(lines(view(50), view(40), view(50))) == 1


def test_a_snapshot_is_told_once() -> None:
    snapshot = SnapshotStatus(step=5, time=START, verified=True)
    assert lines(view(snapshot=snapshot), view(snapshot=snapshot)) == ["snapshot of step 5, verified"]


def test_a_failure_comes_with_its_advice() -> None:
    failure = FailureStatus(attempt=0, time=START, reason="DiskFull", message="m", advice="remove old files")
    assert lines(view(last_failure=failure), view(last_failure=failure)) == ["  remove old files"]


def test_a_wait_before_a_restart_is_told_once_with_its_length_and_its_end() -> None:
    until = START + timedelta(seconds=240)
    told = lines(*(view(restart_at=until, seconds=second) for second in (0, 1, 2, 241)))
    assert told == ["waiting 4m00s before attempt 1, until 00:04:00 UTC (restart.backoff)"]


def test_what_a_rank_prints_is_told_apart_from_what_the_run_says() -> None:
    stream = io.StringIO()
    PlainDisplay(stream).output("epoch 3")
    assert stream.getvalue() == "| epoch 3\n"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([1.0], "0"),
        ([2.0, 2.0, 2.0], "000"),
        ([3.0, 2.0, 1.0, 0.0], "3210"),
        ([3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 0.0, 0.0], "3210"),
        ([3.0, float("nan"), 0.0, float("inf")], "30"),
    ],
)
def test_the_course_of_the_loss_is_a_character_a_column(values: list[float], expected: str) -> None:
    assert sparkline(values, 4, "0123") == expected


def test_a_live_run_shows_the_course_of_its_loss() -> None:
    stream = io.StringIO()
    with LiveDisplay(Console(file=stream, force_terminal=True, width=60)) as display:
        for step, loss in enumerate((3.0, 2.0, 1.0)):
            display.show(view(step, loss=loss))
    assert "█▅▁  loss" in Text.from_ansi(stream.getvalue()).plain


def test_pods_of_a_cluster_are_shown_with_their_nodes_and_without_what_only_this_machine_knows() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    pod = NodeView(0, "digits-1-0", "Running", None, None, "ready", None, "worker-1")
    console.print(picture(replace(view(7), nodes=(pod,))))
    header, row = console.export_text().splitlines()[-2:]
    assert header.split() == ["node", "pod", "phase", "doing", "on"]
    assert row.split() == ["0", "digits-1-0", "Running", "ready", "worker-1"]


def test_lines_have_no_control_characters() -> None:
    stream = io.StringIO()
    with display_for(stream) as display:
        display.event(Event("Warning", "Restarting", "rank 1 was killed"))
        display.show(view(50))
    assert stream.getvalue().isascii()
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_a_reader_that_went_away_does_not_end_the_run(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full, PlainDisplay(full) as display:
        display.write_line("nobody hears this")
        full.close = lambda: None  # type: ignore[method-assign]  # closing would raise what was swallowed


def test_the_picture_shows_what_runs_where_and_what_went_wrong() -> None:
    failure = FailureStatus(
        attempt=0,
        time=START,
        pod_name="digits-0-1",
        reason="WorkerKilled",
        message="rank 1 was killed by SIGKILL",
        advice="look at the memory",
    )
    stream = io.StringIO()
    Console(file=stream, width=120).print(picture(view(50, seconds=65, last_failure=failure)))
    shown = stream.getvalue()
    for part in (
        "digits  Running  attempt 1, restarts 1, 1m05s",
        "step 50/100 (50%), epoch 1, loss 0.25",
        "digits-1-0",
        "71",
        "shared/logs/digits/pods/digits-1-0.log",
        "WorkerKilled on digits-0-1: rank 1 was killed by SIGKILL",
        "look at the memory",
    ):
        assert part in shown


def test_a_terminal_gets_the_live_picture() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with LiveDisplay(console) as display:
        display.show(view(50))
        display.write_line("a line above")
    assert "a line above" in stream.getvalue()
    assert "step 50/100" in stream.getvalue()


def test_success_names_what_was_reached() -> None:
    status = DDPJobStatus(
        restarts=1, progress=Progress(epoch=29, step=690, metrics={"eval_loss": 0.1, "eval_accuracy": 0.97})
    )
    assert success_in_words(status) == "Succeeded: 29 epochs, 690 steps, restarts 1, eval_accuracy 0.97, eval_loss 0.1"
    assert success_in_words(DDPJobStatus(progress=Progress(epoch=1, step=1))) == (
        "Succeeded: 1 epoch, 1 step, restarts 0"
    )


def test_progress_tells_speed_and_time_left() -> None:
    progress = Progress(
        epoch=14,
        step=345,
        total_steps=690,
        loss=0.03123,
        samples_per_second=5230.4,
        eta=START + timedelta(seconds=4),
    )
    expected = "step 345/690 (50%), epoch 14, loss 0.03123, 5,230 samples/s, 4s left"
    assert progress_in_words(progress, START) == expected


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0s"), (59, "59s"), (61, "1m01s"), (3661, "1h01m"), (-1, "0s")])
def test_times_are_short(seconds: float, words: str) -> None:
    assert seconds_in_words(seconds) == words
