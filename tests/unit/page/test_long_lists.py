"""What a long list of jobs costs, in calls of functions, and in files and bytes read: they are the same on each
machine. `make bench-page` has the seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from aiohttp.test_utils import TestClient, TestServer
from tests.benchmarks.bench_page import JOBS, Server, write_folder
from tests.support.calls import Calls

from ddpjob_operator.page import cluster
from ddpjob_operator.page.cluster import ClusterSource, record_of
from ddpjob_operator.page.folder import FolderSource
from ddpjob_operator.page.server import make_app
from ddpjob_operator.page.shared import Shared
from ddpjob_operator.page.values import JobRecord, Source
from ddpjob_operator.page.volumes import Volumes
from ddpjob_operator.runtime.client import Client

MOST_CALLS = 1000
"""For a job of the first list. Of 615 calls, 1,000 jobs take 85 ms of a core's time, and may take 200."""
MOST_BYTES = 15_000
"""For a job of the first list of a folder."""
MOST_LEFT = 200


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


class Counted:
    """A file that counts what is read of it."""

    def __init__(self, file: BinaryIO, reads: Reads) -> None:
        self._file, self._reads = file, reads

    def read(self, most: int) -> bytes:
        data = self._file.read(most)
        self._reads.bytes += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@dataclass
class Reads:
    """Files that were opened since it was cleared."""

    files: list[Path] = field(default_factory=list)
    bytes: int = 0

    def clear(self) -> None:
        self.files.clear()
        self.bytes = 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found, opened = Reads(), Shared.open

    def counted(shared: Shared, path: Path) -> Any:
        file = opened(shared, path)
        found.files.append(path)
        return Counted(file, found)

    monkeypatch.setattr(Shared, "open", counted)
    return found


async def listed(source: Source) -> int:
    """Jobs on a page of the list."""
    async with TestClient(TestServer(make_app(source))) as browser:
        text = await (await browser.get("/")).text()
    return text.count('<th scope="row"><a href="/jobs/')


@pytest.mark.parametrize("with_status", [True, False])
async def test_a_list_of_a_folder_reads_one_small_file_of_a_job_and_none_again(
    tmp_path: Path, reads: Reads, with_status: bool
) -> None:
    write_folder(tmp_path, [f"job-{number:04}" for number in range(JOBS)], with_status)
    source = FolderSource.at(tmp_path)
    assert await listed(source) == JOBS
    assert {path.name for path in reads.files} == {"status.json" if with_status else "events.jsonl"}
    assert len(reads.files) == JOBS
    assert reads.bytes <= MOST_BYTES * JOBS
    reads.clear()
    assert await listed(source) == JOBS
    # jobs without a status may go on, which their lock says: these have none
    assert (reads.files, reads.bytes) == ([], 0)


async def test_a_job_of_a_folder_that_has_changed_is_read_again_and_the_others_are_not(
    tmp_path: Path, reads: Reads
) -> None:
    write_folder(tmp_path, [f"job-{number}" for number in range(9)], status=False)
    source = FolderSource.at(tmp_path)
    await source.jobs()
    events = tmp_path / "logs/job-3/events.jsonl"
    text = events.read_text()
    events.unlink()
    events.write_text(f'{text}{{"time": 1893499999.0, "attempt": 2, "event": "finished", "step": 10000}}\n')
    reads.clear()
    found = {job.name: job for job in await source.jobs()}
    assert reads.files == [events]
    progress = found["job-3"].status.progress
    assert progress is not None
    assert (found["job-3"].phase, progress.step, progress.total_steps) == ("Succeeded", 10_000, 10_000)
    assert found["job-4"].phase == "Unknown"


@pytest.mark.parametrize("claim", ["team/data", "*"])
async def test_a_list_with_a_volume_reads_a_little_of_the_newest_jobs_that_are_left(
    tmp_path: Path, reads: Reads, claim: str
) -> None:
    root = tmp_path if claim != "*" else tmp_path / "team/data"
    write_folder(root, [f"left-{number:04}" for number in range(JOBS)], status=False)
    source = ClusterSource(cast(Client, Server(10)), "team", volumes=Volumes.at(tmp_path, claim))
    assert await listed(source) == 10 + MOST_LEFT
    assert {path.name for path in reads.files} == {"events.jsonl"}
    assert len(reads.files) == MOST_LEFT
    assert reads.bytes <= MOST_BYTES * MOST_LEFT
    reads.clear()
    await source._jobs()
    assert reads.files == []
