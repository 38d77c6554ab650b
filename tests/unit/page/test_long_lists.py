"""What a long list of jobs costs, in calls of functions: they are the same on each machine. `make bench-page` has the
seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
from aiohttp.test_utils import TestClient, TestServer
from tests.benchmarks.bench_page import JOBS, Server

from ddpjob_operator.page import cluster
from ddpjob_operator.page.cluster import ClusterSource, record_of
from ddpjob_operator.page.server import make_app
from ddpjob_operator.page.values import JobRecord
from ddpjob_operator.runtime.client import Client

MOST_CALLS = 1000
"""For a job of the first list. Of 615 calls, 1,000 jobs take 85 ms of a core's time, and may take 200."""


@dataclass
class Calls:
    count: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """All calls of the block, those of functions in C too."""
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _note(self, frame: object, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")


async def requests(jobs: int) -> tuple[int, int]:
    """Calls of the first request for the list and of one after it."""
    first, again = Calls(), Calls()
    app = make_app(ClusterSource(cast(Client, Server(jobs)), "team"))
    async with TestClient(TestServer(app)) as browser:
        for calls in (first, again):
            with calls.counted():
                text = await (await browser.get("/")).text()
            assert text.count('href="/jobs/team/job-') == jobs
    return first.count, again.count


async def test_a_list_of_a_thousand_jobs_takes_ten_times_the_calls_of_a_hundred_and_not_more() -> None:
    few, many = await requests(JOBS // 10), await requests(JOBS)
    assert many[0] <= 10 * few[0]
    assert many[1] <= 10 * few[1]
    assert many[0] <= MOST_CALLS * JOBS


async def test_jobs_that_have_not_changed_are_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def counted(item: dict[str, Any]) -> JobRecord:
        parsed.append(item["metadata"]["name"])
        return record_of(item)

    monkeypatch.setattr(cluster, "record_of", counted)
    source = ClusterSource(cast(Client, Server()), "team")
    await source._jobs()
    assert len(parsed) == len(set(parsed)) == JOBS
    await source._jobs()
    assert len(parsed) == JOBS
