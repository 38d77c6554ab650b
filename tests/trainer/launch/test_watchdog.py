"""The table of the watchdog: who is stalled, and who is merely slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_trainer.launch.stacks import innermost_frame
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
        (rank(silent=-5), False),
        (replace(rank(silent=1799), observed=True), False),
        (replace(rank(silent=1801), observed=True), True),
        (replace(rank(silent=1799, phase="script", step=None, p99=None), observed=True), False),
        (replace(rank(silent=1801, phase="script", step=None, p99=None), observed=True), True),
    ],
)
def test_a_rank_may_be_silent_for_ten_p99_within_bounds_and_longer_where_nothing_has_a_rhythm(case, is_stalled):
    assert (stalled([case], NOW, LIMITS) is not None) == is_stalled


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
