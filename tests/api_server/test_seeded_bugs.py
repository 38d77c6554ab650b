"""The sweep notices bugs: each of these operators does well until a call goes wrong, and then a check of it fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.api_server.conftest import NewCluster
from tests.api_server.proxy import Fault
from tests.api_server.sweep import killed_after, old_picture, restarted, struck_once
from tests.support.waiting import eventually_async

NO_FAULT = -1
START = (NO_FAULT, 2, 3, 4)
"""Numbers of calls: the status that the job starts, and its two pods."""
RESTART = (NO_FAULT, 5, 6, 7)
"""The status that it runs, the status that it restarts, and the Service's new attempt."""

STATUS = "PATCH ddpjobs/status"


def with_bug(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.api_server.seeded_bugs", name)


@pytest.mark.parametrize(
    ("bug", "fault", "calls", "kind", "said"),
    [
        ("counts_each_decision", Fault.CONFLICT, RESTART, STATUS, "restarts 0 -> 2"),
        ("acts_before_it_writes_again", Fault.CONFLICT, RESTART, STATUS, "before that attempt was on record"),
        ("repeats_a_creation_under_another_name", Fault.LOST, START, "POST pods", "had 2 pods"),
    ],
    ids=("counts_each_decision", "acts_before_it_writes_again", "repeats_a_creation_under_another_name"),
)
async def test_a_bug_that_one_answer_brings_out_is_seen(
    new_cluster: NewCluster, tmp_path: Path, bug: str, fault: Fault, calls: tuple[int, ...], kind: str, said: str
) -> None:
    results = await struck_once(new_cluster, tmp_path, fault, calls, with_bug(bug))
    assert results.pop((NO_FAULT, "")) == ""
    caught = {struck: result for (_, struck), result in results.items() if result}
    assert caught.keys() == {kind}, results
    assert said in caught[kind]


async def test_a_bug_that_the_death_of_an_operator_brings_out_is_seen(new_cluster: NewCluster, tmp_path: Path) -> None:
    bug = with_bug("points_the_service_as_an_attempt_begins")
    results = await killed_after(new_cluster, tmp_path, (5, 6, 7), command=bug)
    assert set(results.values()) == {"", "selected: '0', not '1'"}, results


async def test_a_bug_that_an_old_list_brings_out_is_seen(new_cluster: NewCluster, tmp_path: Path) -> None:
    async with old_picture(new_cluster, tmp_path, (restarted,), with_bug("believes_what_it_was_told")) as seen:

        async def made_again() -> list[str]:
            return seen.histories[0].made_again()

        found = await eventually_async(made_again, "pods of the attempt that is over are made again")
    assert {line.partition(" node rank")[0] for line in found} == {"attempt 0,"}
