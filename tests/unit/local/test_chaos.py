"""`--chaos`: what may be asked for, and when which process is killed."""

from __future__ import annotations

import re

import pytest

from ddpjob_operator.core.values.trainer_report import RankReport, TrainerReport
from ddpjob_operator.local.chaos import KillRank, Victim, find_victim, parse_chaos


def report(step: int, total: int | None = 100, rank: int = 1, pid: int | None = 42) -> TrainerReport:
    return TrainerReport(total_steps=total, ranks=(RankReport(rank, pid, step),))


@pytest.mark.parametrize(
    ("text", "chaos"),
    [
        ("kill-rank@50%", KillRank(None, 0.5)),
        ("kill-rank=0@12.5%", KillRank(0, 0.125)),
        ("kill-rank@30steps", KillRank(None, steps=30)),
        ("kill-rank=0@1step", KillRank(0, steps=1)),
    ],
)
def test_a_fault_names_a_rank_and_a_share_of_the_run(text: str, chaos: KillRank) -> None:
    assert parse_chaos(text, ranks=2) == chaos


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kill-rank", "write kill-rank@50%"),
        ("kill-rank@50", "write kill-rank@50%"),
        ("kill-node@50%", "write kill-rank@50%"),
        ("kill-rank@0steps", "write kill-rank@50%, kill-rank@100steps"),
        ("kill-rank=2@50%", "ranks 0 to 1"),
        ("kill-rank=2@5steps", "ranks 0 to 1"),
        ("kill-rank@0%", "between 0% and 100%"),
        ("kill-rank@100%", "between 0% and 100%"),
    ],
)
def test_any_other_fault_is_refused_with_the_form(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_chaos(text, ranks=2)


def test_the_highest_rank_dies_once_the_share_is_reached() -> None:
    reports = [report(50, rank=0, pid=7), report(50, rank=1, pid=42)]
    assert find_victim(KillRank(None, 0.5), reports, ranks=2) == Victim(rank=1, pid=42, step=50)


@pytest.mark.parametrize(
    "too_early_or_too_late",
    [report(49), report(100), report(50, total=None), report(50, pid=None), report(50, rank=0), TrainerReport()],
)
def test_nobody_dies_before_it_or_after_the_end(too_early_or_too_late: TrainerReport) -> None:
    assert find_victim(KillRank(1, 0.5), [too_early_or_too_late], ranks=2) is None


@pytest.mark.parametrize("total", [None, 100])
def test_a_step_needs_no_total(total: int | None) -> None:
    chaos = KillRank(1, steps=30)
    assert find_victim(chaos, [report(29, total)], ranks=2) is None
    assert find_victim(chaos, [report(30, total)], ranks=2) == Victim(rank=1, pid=42, step=30)
    assert find_victim(chaos, [report(30, total=30)], ranks=2) is None, "training has ended"


@pytest.mark.parametrize(
    ("chaos", "step", "total", "reason"),
    [
        (KillRank(None, 0.5), 3, None, "not how many there will be, so 50% .* write kill-rank@100steps"),
        (KillRank(None, 0.5), None, None, "no rank has reported a step"),
        (KillRank(None, steps=5), None, None, "no rank has reported a step"),
        (KillRank(None, 0.5), 3, 100, None),
        (KillRank(None, steps=5), 3, None, None),
    ],
)
def test_a_fault_that_cannot_be_due_says_what_the_script_does_not_report(
    chaos: KillRank, step: int | None, total: int | None, reason: str | None
) -> None:
    found = chaos.never_due(step, total)
    assert (found is None) == (reason is None)
    assert reason is None or re.search(reason, found or "")
