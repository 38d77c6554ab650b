"""The ranks of a job: what is shown of each, which one the others wait for, and where the figures are from."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from tests.unit.page.conftest import Folder

from ddpjob_operator.core.values.observed import PodPhase, PodView
from ddpjob_operator.local.record import ranks_file
from ddpjob_operator.page.files import Shared, ranks_of
from ddpjob_operator.page.rank_reports import read_ranks
from ddpjob_operator.page.ranks import milliseconds, ranks_view, slowest_of
from ddpjob_operator.page.values import RankRow
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def ranks(steps: list[float | None], waits: list[float | None] | None = None) -> list[RankRow]:
    waited = waits or [None] * len(steps)
    return [
        RankRow(rank, step_seconds=step, data_seconds=wait)
        for rank, (step, wait) in enumerate(zip(steps, waited, strict=True))
    ]


@pytest.mark.parametrize(
    ("steps", "waits", "slowest"),
    [
        pytest.param([0.1, 0.1, 0.14, 0.1], None, 2, id="its steps are longer"),
        pytest.param([0.1, 0.1, 0.105, 0.1], None, None, id="hardly longer"),
        pytest.param([0.1] * 4, [0.001, 0.05, 0.001, 0.002], 1, id="all wait for the one whose data comes late"),
        pytest.param([0.1] * 4, [0.05] * 4, None, id="the data of all comes late"),
        pytest.param([0.1], [0.05], None, id="a single rank"),
        pytest.param([None, None], None, None, id="nothing is known"),
        pytest.param([0.0, 0.0], None, None, id="steps of no time"),
    ],
)
def test_the_rank_that_the_others_wait_for(
    steps: list[float | None], waits: list[float | None] | None, slowest: int | None
) -> None:
    found = slowest_of(ranks(steps, waits))
    assert (found[0] if found else None) == slowest


def test_a_rank_in_words() -> None:
    last = NOW - timedelta(seconds=3)
    view = ranks_view(
        [RankRow(1, "digits-0-0", "gpu-1", "first_step", 1200, 0.0712, 0.0043, last), RankRow(0)], NOW
    )  # fmt: skip
    assert [row.rank for row in view.rows] == [0, 1]
    row = view.rows[1]
    assert (row.place, row.node, row.phase, row.step) == ("digits-0-0", "gpu-1", "first step", "1,200")
    assert (row.step_time, row.data_wait, row.when) == ("71 ms", "4.3 ms", "3s ago")
    assert view.has_data_wait
    assert not ranks_view([RankRow(0)], NOW).has_data_wait


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (1.25, "1.25 s"), (0.25, "250 ms"), (0.0042, "4.2 ms"), (0.0, "0 ms"), (0.00004, "0.04 ms")],
)
def test_times(seconds: float | None, text: str) -> None:
    assert milliseconds(seconds) == text


def test_a_folder_has_what_the_ranks_of_the_current_attempt_reported(folder: Folder) -> None:
    path = ranks_file(folder.root, "digits")
    path.parent.mkdir(parents=True)
    rank = {"rank": 0, "pod": "digits-1-0", "phase": "train", "step": 7, "time": "2030-01-01T00:00:00.000+00:00"}
    written = {"version": 1, "uid": "u", "attempt": 1, "ranks": [rank, 5, {"rank": "x"}, {"rank": 1, "time": 5}]}
    path.write_text(json.dumps(written))
    shared = Shared(folder.root)
    assert ranks_of(shared, "digits", "u", 1) == [
        RankRow(0, "digits-1-0", phase="train", step=7, time=NOW),
        RankRow(1),
    ]
    assert ranks_of(shared, "digits", "u", 2) == []
    assert ranks_of(shared, "digits", "another run", 1) == []


class Pods:
    """The API server's proxy: what the launcher of each pod answers, or the error."""

    def __init__(self, **answers: dict[str, Any] | ApiError) -> None:
        self.answers = answers

    async def bounded(self, path: str, most: int, seconds: float) -> bytes:
        name = path.removeprefix("/api/v1/namespaces/team/pods/").removesuffix(":9400/proxy/status")
        answer = self.answers[name.replace("-", "_")]
        if isinstance(answer, ApiError):
            raise answer
        return json.dumps({"version": 1, "uid": "u", "attempt": 0} | answer).encode()


def pod(name: str, **more: Any) -> PodView:
    return PodView(name, name, 0, 0, PodPhase.RUNNING, **more)


async def test_the_pods_of_a_cluster_are_asked_through_the_api_server() -> None:
    said = [{"rank": 2, "phase": "train", "step": 9, "ageSeconds": 1, "stepSeconds": 0.5, "dataSeconds": 0.1}]
    found, note = await read_ranks(
        cast(Client, Pods(a={"ranks": said}, b={"uid": "another job", "ranks": said})),
        "team", "u", 0, (pod("a", node_name="gpu-1"), pod("b")),
    )  # fmt: skip
    assert [(r.rank, r.pod, r.node, r.phase, r.step, r.step_seconds, r.data_seconds) for r in found] == [
        (2, "a", "gpu-1", "train", 9, 0.5, 0.1)
    ]
    assert note == ""


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (ApiError(403, "Forbidden", "no"), "ask for get on pods/proxy"),
        (ApiError(0, "Timeout", "no answer"), "1 of 2 pods do not answer."),
    ],
)
async def test_pods_that_cannot_be_asked_are_said(error: ApiError, note: str) -> None:
    found, said = await read_ranks(
        cast(Client, Pods(a={"ranks": [{"rank": 0}]}, b=error)), "team", "u", 0, (pod("a"), pod("b"))
    )
    assert [rank.rank for rank in found] == [0]
    assert note in said
