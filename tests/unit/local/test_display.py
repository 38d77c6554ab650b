"""What a person reads during a run."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Goodput, Phase, Progress, SnapshotStatus
from ddpjob_operator.core.ledger.ranks import RankRow, Reports
from ddpjob_operator.core.values.actions import Event
from ddpjob_operator.local.display import LiveDisplay, PlainDisplay, display_for, picture
from ddpjob_operator.local.observed import (
    NodeView,
    RankTable,
    RunView,
    nodes_shown,
    progress_in_words,
    rank_table,
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


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_file_gets_lines_where_ci_has_colours_forced(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    assert Console(file=io.StringIO()).is_terminal
    assert isinstance(display_for(io.StringIO()), PlainDisplay)


def test_a_terminal_obeys_nothing_that_a_job_has_said() -> None:
    """Its events and its failures have words of its own, which another person may read."""
    evil, shown = "\x1b]0;title\x07\x1b[2Jgone", "]0;title[2Jgone"
    plain, drawn_once, live = io.StringIO(), io.StringIO(), io.StringIO()
    PlainDisplay(plain).event(Event("Warning", "Restarting", f"{evil}\n\tnext"))
    assert plain.getvalue() == f"Restarting: {shown}\n\tnext\n"
    failure = FailureStatus(attempt=0, time=START, pod_name="digits-0-1", reason="Failed", message=evil, advice=evil)
    Console(file=drawn_once, width=100).print(picture(view(50, last_failure=failure)))
    assert drawn_once.getvalue().count(shown) == 2
    assert "\x1b" not in drawn_once.getvalue()
    with LiveDisplay(Console(file=live, force_terminal=True, width=100)) as display:
        display.event(Event("Warning", "Restarting", evil))
        display.output(evil)
    assert Text.from_ansi(live.getvalue()).plain.count(shown) == 2
    assert "\x1b]" not in live.getvalue()


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


JOB = "a-job-with-a-long-name"
NODE = "a-node-with-a-rather-long-name.europe-west4-a.compute"


def gang(ranks: int, slow: int = 3) -> Reports:
    rows = []
    for rank in range(ranks):
        passes = 0.09 if rank == slow else 0.01
        rows.append(RankRow(rank, f"{JOB}-0-{rank}", NODE, "train", 50, 0.1, 0.001, START, passes))
    return Reports(tuple(rows), note="7 of 64 pods do not answer.")


def busy_view() -> RunView:
    """A run with everything that a view has a line for, in long words."""
    failure = FailureStatus(
        attempt=0, time=START, pod_name=f"{JOB}-0-1", reason="WorkerException",
        message="rank 1 raised FileNotFoundError: /mnt/shared/datasets/of-a-very-long-name/that-has-no-space/train.pt",
        advice="Fix the exception, then apply the job again; it resumes from the newest snapshot that is verified.",
    )  # fmt: skip
    goodput = Goodput(training=70.0, recovering=15.0, saving=5.0, queued=10.0, ratio=0.7)
    snapshot = SnapshotStatus(step=5, time=START, verified=True)
    until = START + timedelta(hours=1)
    shown = view(50, seconds=65, last_failure=failure, goodput=goodput, snapshot=snapshot, restart_at=until)
    nodes = tuple(NodeView(rank, f"{JOB}-0-{rank}", "Running", None, None, "ready", None, NODE) for rank in range(3))
    return replace(shown, nodes=nodes, reports=gang(64))


def test_of_many_pods_those_that_are_not_ready_are_shown_and_the_others_counted() -> None:
    """A table of all would push what comes after it out of the terminal."""
    waiting = (7, 1023)
    nodes = tuple(
        NodeView(rank, f"{JOB}-0-{rank}", "Pending", None, None, "Unschedulable", None)
        if rank in waiting
        else NodeView(rank, f"{JOB}-0-{rank}", "Running", None, None, "ready", None, NODE)
        for rank in range(1024)
    )
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(picture(replace(view(7), nodes=nodes)))
    shown = [line.rstrip() for line in console.export_text().splitlines()]
    assert [line.split()[0] for line in shown if "Unschedulable" in line] == ["7", "1023"]
    assert shown[-1] == "and 1008 more: 1008 ready"
    assert len(shown) < 24


def test_a_pod_that_waits_is_shown_before_those_that_are_done() -> None:
    done = [NodeView(rank, f"{JOB}-0-{rank}", "Succeeded", None, None, "", None, NODE) for rank in range(20)]
    waits = NodeView(20, f"{JOB}-0-20", "Pending", None, None, "Unschedulable", None)
    assert nodes_shown((*done, waits)) == ((*done[:15], waits), "and 5 more: 5 Succeeded")


def test_the_slowest_ranks_and_the_goodput_by_cause_are_shown() -> None:
    stream = io.StringIO()
    Console(file=stream, width=120).print(picture(busy_view()))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert "goodput 70%, recovering 15%, queued 10%, saving 5%" in lines
    head = next(number for number, line in enumerate(lines) if line.lstrip().startswith("rank  pod"))
    assert lines[head].split() == ["rank", "pod", "step", "step", "time", "data", "wait", "passes"]
    rows = [line.split() for line in lines[head + 1 : head + 6]]
    assert [row[0] for row in rows] == ["3", "0", "1", "2", "4"]
    assert rows[0] == ["3", "a-job-with-a-long-name-0-3", "50", "100", "ms", "1", "ms", "90", "ms"]
    assert lines[head + 6 : head + 9] == [
        "and 59 more, 100 ms a step",
        "7 of 64 pods do not answer.",
        "the others wait for rank 3: its own forward and backward passes take 90 ms, those of the median rank 10 ms",
    ]


def test_ranks_that_have_made_no_step_take_no_room() -> None:
    assert rank_table(Reports((RankRow(0, phase="load"),))) == RankTable()


def drawn(width: int, shown: RunView) -> str:
    """What a terminal of that width gets."""
    stream = io.StringIO()
    with LiveDisplay(Console(file=stream, force_terminal=True, width=width)) as display:
        for step in range(99):
            progress = Progress(epoch=1, step=step, total_steps=100, loss=1.0 / (step + 1), samples_per_second=1e6)
            display.show(replace(shown, status=shown.status.model_copy(update={"progress": progress})))
        display.event(Event("Warning", "Restarting", "rank 1 of pod a-job-with-a-long-name-0-1 was killed by SIGKILL"))
        display.write_line("a line of the run that is longer than sixty columns, as some are: " + "x" * 70)
    return stream.getvalue()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("width", [60, 80])
def test_no_line_is_wider_than_the_terminal(width: int, local: bool) -> None:
    nodes = view().nodes if local else busy_view().nodes
    lines = Text.from_ansi(drawn(width, replace(busy_view(), nodes=nodes))).plain.splitlines()
    assert max(cell_len(line.rstrip()) for line in lines) <= width
    told = (
        "step 98/100 (98%), epoch 1, loss 0.0101", "  loss", "goodput 70%", "the others wait for rank 3", "Restarting",
        "rank  pod ", "  step  step time  data wait  passes", "    50     100 ms       1 ms   90 ms", "and 59 more",
        "snapshot of step 5, verified", "node  pod ", "Running  train" if local else "Running  ready",
    )  # fmt: skip
    for part in told:
        assert any(part in line for line in lines), part


def test_without_colour_nothing_is_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colour.search(drawn(60, busy_view()))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(drawn(60, busy_view()))


def test_a_pipe_has_the_pace_in_plain_lines_when_it_changes() -> None:
    text = busy_view()
    times = ((31, text), (62, text), (93, replace(text, reports=gang(64, slow=5))))
    told = lines(*(replace(each, now=START + timedelta(seconds=seconds)) for seconds, each in times))
    assert [line for line in told if line.startswith("  ") and "Fix the exception" not in line] == [
        "  goodput 70%, recovering 15%, queued 10%, saving 5%",
        "  the others wait for rank 3: its own forward and backward passes take 90 ms, those of the median rank 10 ms",
        "  7 of 64 pods do not answer.",
        "  goodput 70%, recovering 15%, queued 10%, saving 5%",
        "  the others wait for rank 5: its own forward and backward passes take 90 ms, those of the median rank 10 ms",
        "  7 of 64 pods do not answer.",
    ]
    assert "\x1b" not in "".join(told)
    assert "".join(told).isascii()


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
