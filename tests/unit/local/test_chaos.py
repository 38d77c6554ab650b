"""`--chaos`: what may be asked for, and when which process is killed."""

from __future__ import annotations

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
        ("kill-rank=2@50%", "ranks 0 to 1"),
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
