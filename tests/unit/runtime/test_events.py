"""Events about jobs: aggregated, capped, and in nobody's way."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from tests.unit.virtual_time import run

from ddpjob_operator.core.values.actions import Event
from ddpjob_operator.runtime import events
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.events import CAP, REFILL_SECONDS, SAME_WITHIN_SECONDS, EventRecorder, Subject

JOB = Subject("training.ddpjob.io/v1alpha1", "DDPJob", "ns", "digits", "uid-1")


class Server:
    """Stands for the API server's end of two calls, so that time can be virtual."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.patched: list[tuple[str, dict[str, Any]]] = []
        self.refuses: list[ApiError] = []

    async def create(self, path: str, resource: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.refuses:
            raise self.refuses.pop(0)
        self.made.append(body)
        return body

    async def merge_patch(self, path: str, resource: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.refuses:
            raise self.refuses.pop(0)
        self.patched.append((path, body))
        return body


def event(number: int = 0) -> Event:
    return Event("Warning", "Restarting", f"attempt {number} ended")


async def said(server: Server, *sayings: tuple[float, Event]) -> None:
    """Say each event after its pause, and wait until all are posted."""
    recorder = EventRecorder(server)  # type: ignore[arg-type]
    task = asyncio.create_task(recorder.run())
    for pause, saying in sayings:
        await asyncio.sleep(pause)
        recorder.record(JOB, saying)
        await recorder.drain(within=10)
    task.cancel()


def test_the_same_thing_said_again_raises_the_count_of_the_first_event() -> None:
    server = Server()
    run(said(server, (0, event()), (1, event()), (1, event())))
    assert len(server.made) == 1
    assert [body["count"] for _, body in server.patched] == [2, 3]
    assert all(path.endswith(server.made[0]["metadata"]["name"]) for path, _ in server.patched)


def test_the_same_thing_said_much_later_is_a_new_event() -> None:
    server = Server()
    run(said(server, (0, event()), (SAME_WITHIN_SECONDS + 1, event())))
    assert len(server.made) == 2


def test_an_event_that_has_expired_on_the_server_is_made_anew() -> None:
    server = Server()

    async def main() -> None:
        recorder = EventRecorder(server)  # type: ignore[arg-type]
        task = asyncio.create_task(recorder.run())
        recorder.record(JOB, event())
        await recorder.drain(10)
        server.refuses.append(ApiError(404, "NotFound", "gone"))
        recorder.record(JOB, event())
        await recorder.drain(10)
        task.cancel()

    run(main())
    assert len(server.made) == 2


def test_a_job_makes_no_more_events_than_its_share() -> None:
    server = Server()
    run(said(server, *((0, event(number)) for number in range(CAP + 20))))
    assert len(server.made) == CAP


def test_the_share_grows_again_with_time() -> None:
    server = Server()
    run(
        said(
            server,
            *((0, event(number)) for number in range(CAP)),
            (2 * REFILL_SECONDS + 1, event(98)),
            (0, event(99)),
        )
    )
    assert len(server.made) == CAP + 2


def test_a_share_that_is_full_again_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_REMEMBERED", 3)

    async def main() -> int:
        recorder = EventRecorder(Server())  # type: ignore[arg-type]
        task = asyncio.create_task(recorder.run())
        for number in range(10):
            recorder.record(Subject("training.ddpjob.io/v1alpha1", "DDPJob", "ns", "digits", f"uid-{number}"), event())
            await recorder.drain(within=10)
            await asyncio.sleep(CAP * REFILL_SECONDS)
        task.cancel()
        return len(recorder._allowances)

    assert run(main()) <= 4


def test_a_refused_event_does_not_stop_the_next() -> None:
    server = Server()
    server.refuses.append(ApiError(403, "Forbidden", "no events here"))
    run(said(server, (0, event(1)), (0, event(2))))
    assert [body["message"] for body in server.made] == ["attempt 2 ended"]


def test_saying_never_waits_and_drops_what_is_too_much() -> None:
    async def main() -> int:
        recorder = EventRecorder(Server())  # type: ignore[arg-type]
        for number in range(5000):
            recorder.record(JOB, event(number))
        return recorder._waiting.qsize()

    assert run(main()) < 5000


def test_a_message_is_cut_to_what_the_api_server_takes() -> None:
    server = Server()
    run(said(server, (0, Event("Warning", "Failed", "x" * 5000))))
    assert len(server.made[0]["message"]) == 1024


@pytest.mark.parametrize("job", ["a" * 199 + "-b", "a" * 198 + "--b", "a" * 199 + ".b", "a" * 253, "digits"])
def test_an_event_of_a_job_with_a_long_name_has_a_name_that_the_api_server_takes(job: str) -> None:
    server = Server()

    async def main() -> None:
        recorder = EventRecorder(server)  # type: ignore[arg-type]
        task = asyncio.create_task(recorder.run())
        recorder.record(JOB._replace(name=job), event())
        await recorder.drain(within=10)
        task.cancel()

    run(main())
    (name,) = (body["metadata"]["name"] for body in server.made)
    assert len(name) <= 253
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", name)
    assert name.startswith(job[:198].rstrip("-."))
