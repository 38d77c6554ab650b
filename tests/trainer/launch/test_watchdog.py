"""The table of the watchdog: who is stalled, and who is merely slow."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import PATIENCE_SECONDS

from ddp_trainer.contract import run_dir
from ddp_trainer.launch.stacks import collective, dump_stacks, innermost_frame, script_stack
from ddp_trainer.launch.watchdog import Limits, Rank, stalled

LIMITS = Limits(min_seconds=30, max_seconds=1800)
NOW = 10_000.0


def rank(number=0, phase="train", step=10, silent=0.0, p99=0.1, state="S"):
    return Rank(number, phase, step, NOW - silent, p99, state)


@pytest.mark.parametrize(
    ("case", "is_stalled"),
    [
        (rank(silent=29), False),
        (rank(silent=31), True),
        (rank(silent=49, p99=5.0), False),
        (rank(silent=51, p99=5.0), True),
        (rank(silent=1799, p99=500.0), False),
        (rank(silent=1801, p99=500.0), True),
        (rank(silent=600, step=None, p99=None), False),
        (rank(silent=1801, step=None, p99=None), True),
        (rank(silent=1799, phase="first_step", step=0, p99=None), False),
        (rank(silent=1801, phase="first_step", step=0, p99=None), True),
        (rank(silent=1799, phase="validate"), False),
        (rank(silent=1799, phase="save"), False),
        (rank(silent=1801, phase="save"), True),
        (rank(silent=599, phase="init", p99=None), False),
        (rank(silent=601, phase="init", p99=None), True),
        (rank(silent=901, phase="rendezvous", p99=None), True),
        (rank(silent=301, phase="done"), True),
        (rank(silent=10_000, phase="ended"), False),
        (rank(silent=-5), False),
        (replace(rank(silent=1799, phase="script", step=None, p99=None), observed=True), False),
        (replace(rank(silent=1801, phase="script", step=None, p99=None), observed=True), True),
    ],
)
def test_a_rank_may_be_silent_for_ten_p99_within_bounds_and_longer_where_nothing_has_a_rhythm(case, is_stalled):
    assert (stalled([case], NOW, LIMITS) is not None) == is_stalled


@pytest.mark.parametrize("phase", ["init", "first_step", "train", "validate", "save"])
@pytest.mark.parametrize(
    ("stopped", "silent", "is_stalled"),
    [(29, 100, False), (31, 100, True), (100, 29, False), (100, 31, True)],
    ids=["not-long", "long", "since-its-progress", "long-since-its-progress"],
)
def test_a_rank_that_a_signal_has_stopped_is_not_at_work_in_any_phase(phase, stopped, silent, is_stalled):
    case = replace(rank(silent=silent, phase=phase, p99=20.0, state="T"), stopped_at=NOW - stopped)
    verdict = stalled([rank(1, silent=silent, phase=phase, p99=20.0), case], NOW, LIMITS)
    assert (verdict is not None) == is_stalled
    if verdict is not None:
        assert verdict.rank == 0
        assert f"rank 0 made no progress for {silent} s (allowed: 30 s)" in verdict.message


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([rank(0, silent=40), rank(1, silent=40, state="T")], 1),
        ([rank(0, silent=40), rank(1, silent=40, state="D")], 1),
        ([rank(0, silent=40, step=11), rank(1, silent=40, step=10)], 1),
        ([rank(0, silent=40), rank(1, silent=41)], 1),
        ([rank(0, silent=40), rank(1, phase="save", silent=41)], 0),
        ([rank(0, silent=40, step=11), rank(1, step=10, silent=1)], 0),
    ],
    ids=["stopped", "in-the-kernel", "behind", "longest-silent", "saving-is-allowed", "not-late"],
)
def test_among_ranks_that_all_wait_the_one_that_holds_them_up_is_named(ranks, named):
    verdict = stalled(ranks, NOW, LIMITS)
    assert verdict is not None
    assert verdict.rank == named


def test_the_message_says_where_every_rank_stood():
    verdict = stalled([rank(0, silent=40), rank(1, silent=41, state="T", step=None)], NOW, LIMITS)
    assert verdict is not None
    assert verdict.message == (
        "rank 1 made no progress for 41 s (allowed: 30 s): rank 0 in train after step 10, silent for 40 s; "
        "rank 1 in train before its first step, silent for 41 s, stopped by a signal"
    )


def test_no_rank_is_no_stall():
    assert stalled([], NOW, LIMITS) is None


def test_the_scripts_own_frame_is_found_among_those_of_packages():
    text = (
        "Thread 0x1 (most recent call first):\n"
        '  File "/opt/app/loader.py", line 1 in wait\n\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", line 9 in all_reduce\n'
        '  File "/opt/app/train.py", line 12 in step\n'
        '  File "/opt/app/train.py", line 40 in <module>\n'
    )
    assert innermost_frame(text) == "step (train.py:12)"
    assert innermost_frame("") is None


def test_a_hook_that_observes_a_script_is_no_frame_of_it_wherever_it_is_installed():
    text = (
        "Current thread 0x2 (most recent call first):\n"
        '  File "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 9 in _engine_run_backward\n'
        '  File "/src/trainer_image/ddp_trainer/rank/observe_torch.py", line 12 in backward\n'
        '  File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 9 in backward\n'
        '  File "/opt/app/train.py", line 40 in step\n'
        '  File "/src/trainer_image/ddp_trainer/rank/worker.py", line 40 in main\n'
    )
    assert (innermost_frame(text), collective(text)) == ("step (train.py:40)", "backward")
    assert script_stack(text) == "step (train.py:40)"


def at(number, place, collective=None, **given):
    return replace(rank(number, **given), frame=place, collective=collective)


def waits(number, place="step (train.py:9)", collective="all_reduce", **given):
    return at(number, place, collective, **{"silent": 40, **given})


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([waits(0), waits(1), at(2, "load (train.py:5)", silent=40), waits(3)], 2),
        ([waits(0, silent=50), waits(1), at(2, "load (train.py:5)", silent=31), waits(3)], 2),
        ([waits(0), waits(1), waits(2, "validate (train.py:20)", "barrier", step=11), waits(3)], 2),
        ([waits(0), waits(1), waits(2, "step (train.py:9)", "broadcast"), waits(3)], 2),
        ([waits(0), waits(1), waits(2, "validate (train.py:20)", "barrier", silent=31, p99=5.0), waits(3)], 2),
        ([waits(0), waits(1), waits(2, "<module> (train.py:50)", phase="done", silent=50), waits(3)], 2),
        ([waits(0), waits(1), rank(2, phase="ended", silent=0), waits(3)], 2),
        ([waits(0), waits(1, state="T"), waits(2), waits(3)], 1),
        ([at(0, "a (t.py:1)", silent=40), at(1, "a (t.py:1)", silent=40), at(2, "b (t.py:2)", silent=40)], 2),
        ([waits(0, step=11), waits(1, "other (train.py:20)", "barrier", step=10)], 1),
        ([waits(0), at(1, None, silent=40), waits(2)], 1),
        ([rank(0, phase="done"), rank(1, phase="done"), at(2, "step (train.py:9)", silent=40)], 2),
    ],
    ids=[
        "sleeps",
        "sleeps-and-was-late-last",
        "skipped-one",
        "in-another-collective",
        "in-another-collective-and-not-late-yet",
        "fewer-batches",
        "has-ended",
        "stopped-in-a-collective",
        "without-collectives-the-minority",
        "two-ranks",
        "gives-no-stack",
        "late-at-the-end",
    ],
)
def test_the_rank_that_is_not_in_the_collective_is_named(ranks, named):
    verdict = stalled(ranks, NOW, LIMITS)
    assert verdict is not None
    assert verdict.rank == named


@pytest.mark.parametrize(
    "working",
    [
        at(2, "validate (train.py:20)", phase="validate", silent=600),
        at(2, "validate (train.py:20)", silent=1),
        replace(at(2, "save (train.py:20)", silent=200), observed=True),
        waits(2, "step (train.py:8)", "forward", silent=5),
        at(2, "finish (train.py:30)", phase="done", silent=5),
    ],
    ids=["validates", "was-active", "observed", "computes-below-ddp", "leaves"],
)
def test_ranks_that_wait_for_one_that_works_are_not_stalled(working):
    assert stalled([waits(0), waits(1), working, waits(3)], NOW, LIMITS) is None


def looks(number, place="wait (t.py:3)", phase="script", **given):
    """For a lock or a file, before its first step."""
    return at(number, place, phase=phase, **{"silent": 1900, "step": None, "p99": None, **given})


PREPARES = looks(0, "tokenize (t.py:9)", silent=1)


@pytest.mark.parametrize(
    "ranks",
    [
        [PREPARES, looks(1), looks(2)],
        [PREPARES, looks(1, state="D"), looks(2)],
        [PREPARES, looks(1), waits(2, phase="script", step=None, p99=None, silent=1900)],
        [PREPARES, looks(1), rank(2, phase="ended")],
        [looks(0, "tokenize (t.py:9)", phase="init", silent=1), looks(1, phase="init", silent=700)],
        [looks(0, "tokenize (t.py:9)", phase="first_step", silent=1), looks(1, phase="first_step", step=40)],
    ],
    ids=["observed", "as-nfs-shows-it", "another-in-a-collective", "another-has-ended", "attaches", "resumed"],
)
def test_ranks_that_look_before_their_first_step_for_what_one_prepares_are_not_stalled(ranks):
    assert stalled(ranks, NOW, LIMITS) is None


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([looks(0, "tokenize (t.py:9)", silent=1850), looks(1), looks(2)], 0),
        ([looks(0, "tokenize (t.py:9)", silent=31), looks(1)], 1),
        ([PREPARES, looks(1), looks(2, state="T")], 2),
        ([PREPARES, looks(1), replace(looks(2, silent=40), stopped_at=NOW - 40)], 2),
        ([PREPARES, looks(1), looks(2, p99=0.1, step=10)], 2),
        ([waits(0, phase="script", step=None, p99=None, silent=1), looks(1)], 1),
        ([rank(0, phase="ended"), looks(1)], 1),
    ],
    ids=["all-sleep", "one-sleeps-since-then", "stopped", "stopped-just-now", "had-steps", "waited-for", "ended"],
)
def test_ranks_that_stand_still_before_their_first_step_are_stalled_unless_another_works(ranks, named):
    verdict = stalled(ranks, NOW, LIMITS)
    assert verdict is not None
    assert verdict.rank == named


@pytest.mark.parametrize(("silent", "is_stalled"), [(299, False), (301, True)])
def test_a_script_that_is_only_observed_may_be_silent_ten_times_longer(silent, is_stalled):
    assert (stalled([replace(rank(silent=silent), observed=True)], NOW, LIMITS) is not None) == is_stalled


def test_the_message_of_a_large_gang_describes_sixteen_ranks_with_the_one_it_names():
    verdict = stalled([waits(number) for number in range(63)] + [at(63, "load (t.py:5)", silent=40)], NOW, LIMITS)
    assert verdict is not None
    assert verdict.rank == 63
    assert verdict.message.count("silent for") == 16
    assert "rank 63 in train" in verdict.message
    assert verdict.message.endswith("; and 48 more ranks")


IN_COLLECTIVE = (
    "Thread 0x1 (most recent call first):\n"
    '  File "/opt/app/loader.py", line 1 in wait\n\n'
    "Current thread 0x2 (most recent call first):\n"
    '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
    '  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper\n'
    '  File "/opt/app/train.py", line 12 in step\n'
    '  File "/opt/app/train.py", line 40 in <module>\n'
    '  File "<frozen runpy>", line 88 in _run_code\n'
)
PACKAGES = "/venv/lib/python3.11/site-packages/torch"
IN_BACKWARD = (
    "Current thread 0x2 (most recent call first):\n"
    f'  File "{PACKAGES}/autograd/graph.py", line 9 in _engine_run_backward\n'
    f'  File "{PACKAGES}/autograd/__init__.py", line 9 in backward\n'
    f'  File "{PACKAGES}/_tensor.py", line 9 in backward\n'
    '  File "/opt/app/train.py", line 13 in step\n'
)
BELOW_DDP = (
    "Current thread 0x2 (most recent call first):\n"
    '  File "/opt/app/model.py", line 3 in forward\n'
    f'  File "{PACKAGES}/nn/parallel/distributed.py", line 9 in forward\n'
    '  File "/opt/app/train.py", line 11 in step\n'
)


@pytest.mark.parametrize(
    ("text", "function", "frame"),
    [
        (IN_COLLECTIVE, "all_reduce", "step (train.py:12)"),
        (IN_BACKWARD, "backward", "step (train.py:13)"),
        (BELOW_DDP, None, "forward (model.py:3)"),
        ("", None, None),
    ],
    ids=["in a collective", "in a backward pass", "in a forward pass below DDP", "no stack"],
)
def test_the_stack_tells_whether_a_rank_waits_in_a_collective(text, function, frame):
    assert (collective(text), innermost_frame(text)) == (function, frame)


def test_the_stack_of_a_message_has_the_scripts_frames_only():
    assert script_stack(IN_COLLECTIVE) == "step (train.py:12) < <module> (train.py:40)"
    assert script_stack("") is None


class Counted(Rank):
    """A rank that counts how often something of it is read, to be compared too."""

    reads = 0

    def __getattribute__(self, name: str) -> Any:
        Counted.reads += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("function", ["all_reduce", None], ids=["in a collective", "each by itself"])
def test_the_work_for_a_verdict_grows_with_the_ranks_not_with_their_square(function: str | None) -> None:
    """In a hang all ranks of a gang are late at once, and the thread that judges them also ends them."""

    def reads(size: int) -> int:
        ranks = [
            Counted(number, "train", 10, NOW - 100.0, 0.1, "S", frame="step (train.py:12)", collective=function)
            for number in range(size)
        ]
        Counted.reads = 0
        assert stalled(ranks, NOW, LIMITS) is not None
        return Counted.reads

    assert reads(400) < 5 * reads(100)


@pytest.mark.processes
@pytest.mark.parametrize("closes", [False, True], ids=["as it is", "closed by the script"])
def test_stacks_never_go_into_a_file_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    if not closes:
        monkeypatch.setattr("ddp_trainer.launch.stacks.ANSWER_SECONDS", PATIENCE_SECONDS)
    stacks, data = run_dir.stack_file(tmp_path, 0), tmp_path / "data"
    stacks.parent.mkdir()
    script = f"""
import faulthandler, os, time
from pathlib import Path
faulthandler.register({int(run_dir.STACK_SIGNAL)}, file=open({str(stacks)!r}, "a"), all_threads=True, chain=False)
if {closes}:  # as a daemon does
    os.closerange(3, 256)
files = [open({str(data)!r}, "ab") for _ in range(8)]
print("ready", flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            texts = dump_stacks(tmp_path, {0: process.pid})
        finally:
            process.kill()
    assert data.read_bytes() == b""
    assert ("Current thread" in texts[0]) is not closes
