"""`ddpjob events`: which events are the job's, in which order, and how they read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from tests.unit.virtual_time import run

from ddpjob_operator.core.values.names import pod_name
from ddpjob_operator.follow.events import Happened, follow_events, happened_to
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.events import parse_event

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
JOB = {"metadata": {"name": "digits", "uid": "job", "creationTimestamp": (NOW - timedelta(minutes=10)).isoformat()}}


def event(about: str, seconds_ago: int, kind: str = "Pod", **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"uid": f"{about}-{seconds_ago}", "name": f"{about}.18c"},
        "involvedObject": {"kind": kind, "name": about, "uid": more.pop("uid", f"uid of {about}")},
        "lastTimestamp": (NOW - timedelta(seconds=seconds_ago)).isoformat(),
        "type": "Normal",
        "reason": "Scheduled",
        "message": "assigned\n",
        "count": 1,
    } | more


def lines(events: Iterable[dict[str, Any]], job: dict[str, Any] = JOB) -> list[str]:
    views = [view for item in events if (view := parse_event(item)) is not None]
    return [happened.line(NOW) for _, happened in happened_to(job, views)]


def test_events_are_in_order_with_attempt_pod_and_count() -> None:
    assert lines(
        [
            event("digits-1-0", 10, type="Warning", reason="BackOff", message="restarting\x1b[2J", count=3),
            event("digits", 40, kind="DDPJob", uid="job", reason="Starting", message="attempt 0 begins"),
            event("digits-0-s1", 30),
            event("digits-init-0", 35),
            event("digits-shared", 20, kind="PersistentVolumeClaim", reason="Provisioning"),
        ]
    ) == [
        "11:59:20Z job: Starting: attempt 0 begins",
        "11:59:25Z pod digits-init-0: Scheduled: assigned",
        "11:59:30Z attempt 0, pod digits-0-s1: Scheduled: assigned",
        "11:59:40Z claim digits-shared: Provisioning: assigned",
        "11:59:50Z attempt 1, pod digits-1-0: Warning BackOff (x3): restarting[2J",
    ]


@pytest.mark.parametrize(
    "foreign",
    [
        event("digits", 5, kind="DDPJob", uid="an earlier job of the name"),
        event("digits-0-1", 700),
        event("digits-0-0-1", 5),
        event("digits-web-0", 5),
        event("mydigits-0-1", 5),
        event("digits-0-1", 5, kind="Service"),
        event("mnist-shared", 5, kind="PersistentVolumeClaim"),
    ],
)
def test_events_of_other_jobs_are_left_out(foreign: dict[str, Any]) -> None:
    assert lines([foreign]) == []


def test_pods_of_a_job_whose_name_had_to_be_shortened_are_recognised() -> None:
    name = "a" * 62 + ".b"
    job = {"metadata": JOB["metadata"] | {"name": name}}
    assert len(lines([event(pod_name(name, 12, 3), 5)], job)) == 1


@pytest.mark.parametrize(
    "times",
    [
        {"lastTimestamp": None, "eventTime": "2030-01-01T11:59:00.123456Z"},
        {"lastTimestamp": None, "series": {"lastObservedTime": "2030-01-01T11:59:00Z", "count": 4}},
        {"lastTimestamp": None, "firstTimestamp": "2030-01-01T11:59:00Z"},
    ],
)
def test_every_form_of_an_events_time_is_read(times: dict[str, Any]) -> None:
    assert lines([event("digits-0-1", 5, **times)])[0].startswith("11:59:00Z ")


def test_the_date_is_given_where_it_is_not_todays() -> None:
    job = {"metadata": {"name": "digits", "uid": "job"}}
    assert lines([event("digits-0-1", 86400)], job)[0].startswith("2029-12-31 12:00:00Z ")


class Upgraded:
    """An API server that is upgraded from 1 s to 100 s, while a job succeeds."""

    def _check(self) -> None:
        if 1 <= asyncio.get_running_loop().time() < 100:
            raise ApiError(503, "ServiceUnavailable", "the server is currently unable to handle the request")

    async def get(self, path: str, resource: str) -> dict[str, Any]:
        self._check()
        return JOB | {"status": {"phase": "Running" if asyncio.get_running_loop().time() < 50 else "Succeeded"}}

    async def list(self, path: str, resource: str, **query: str) -> tuple[list[dict[str, Any]], int]:
        self._check()
        of_pods = query["fieldSelector"] == "involvedObject.kind=Pod"
        return [event("digits-0-1", 5)] if of_pods else [], 1


class Succeeded:
    """A job that has succeeded, whose last event is posted after so many seconds; None: its events have expired."""

    def __init__(self, posted: float | None) -> None:
        self.posted = posted

    async def get(self, path: str, resource: str) -> dict[str, Any]:
        return JOB | {"status": {"phase": "Succeeded"}}

    async def list(self, path: str, resource: str, **query: str) -> tuple[list[dict[str, Any]], int]:
        there = self.posted is not None and asyncio.get_running_loop().time() >= self.posted
        end = event("digits", 5, kind="DDPJob", uid="job", reason="Succeeded")
        return [end] if there and query["fieldSelector"] == "involvedObject.uid=job" else [], 1


@pytest.mark.parametrize(("posted", "reasons"), [(1.0, ["Succeeded"]), (7.0, ["Succeeded"]), (None, [])])
def test_the_event_of_a_jobs_end_is_waited_for_which_a_busy_operator_posts_late(
    posted: float | None, reasons: list[str]
) -> None:
    said = list[Happened]()
    assert run(follow_events(cast(Any, Succeeded(posted)), "default", "digits", said.append))
    assert [happened.reason for happened in said] == reasons


def test_the_job_that_replaces_the_one_that_is_followed_ends_the_following_of_events() -> None:
    class Replaced(Succeeded):
        async def get(self, path: str, resource: str) -> dict[str, Any]:
            if asyncio.get_running_loop().time() < 10:
                return JOB | {"status": {"phase": "Running"}}
            return {"metadata": JOB["metadata"] | {"uid": "the next one"}, "status": {"phase": "Succeeded"}}

    with pytest.raises(ApiError, match="digits in namespace default was deleted, and another job has its name now"):
        run(follow_events(cast(Any, Replaced(None)), "default", "digits", lambda _: None))


def test_an_upgrade_of_the_control_plane_does_not_end_the_following_of_events() -> None:
    said, notes = list[Happened](), list[str]()
    assert run(follow_events(cast(Any, Upgraded()), "default", "digits", said.append, notes.append))
    assert [happened.about for happened in said] == ["digits-0-1"]
    assert notes == ["the server is currently unable to handle the request; trying again"]
