"""Volumes that are mounted beside a cluster: the right one for each job, and what outlives its pods and the DDPJob."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from tests.unit.page.conftest import START, Folder
from tests.unit.page.test_cluster import ApiServer, detail, item, source

from ddpjob_operator.follow.lines import Line
from ddpjob_operator.page.cluster import ClusterSource
from ddpjob_operator.page.server import make_app
from ddpjob_operator.page.values import LogQuery
from ddpjob_operator.page.volumes import Volumes

HEADER = "---- 2030-01-01T00:00:00Z {pod} ({uid}) starts, 4 ranks, with times\n"
DATA = {"shared": {"claimName": "data"}}
OWN = {"shared": {"claimName": "data", "scope": "Job"}}


def printed(folder: Folder, pod: str, *lines: str, uid: str = "uid-1") -> Path:
    path = folder.log(
        pod, HEADER.format(pod=pod, uid=uid) + "".join(f"2030-01-01T00:00:07Z {line}\n" for line in lines)
    )
    os.utime(path, (START + 86400, START + 86400))
    return path


def job(attempt: int = 1, phase: str = "Failed", spec: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    found = item(spec={"nodes": 2, "procsPerNode": 4} | (DATA if spec is None else spec))
    found["metadata"] |= {"uid": "uid-1", "creationTimestamp": "2030-01-01T00:00:00Z"}
    found["status"] = {"phase": phase, "attempt": attempt, "startTime": "2030-01-01T00:00:01Z"} | status
    return found


class NoPods(ApiServer):
    """Pods are gone."""

    async def list(self, path: str, resource: str, **query: str) -> tuple[list[dict[str, Any]], int]:
        found, version = await super().list(path, resource, **query)
        return ([] if resource == "pods" else found), version


def with_volume(server: ApiServer, folder: Folder, claim: str = "team/data") -> ClusterSource:
    found = source(server)
    found._volumes = Volumes.at(folder.root, claim)
    return found


def texts(lines: Any) -> list[tuple[int, str]]:
    assert lines is not None
    return [(line.rank, line.text) for line in lines]


async def followed(found: ClusterSource, query: LogQuery) -> list[Line]:
    return [line async for line in found.follow("team", "digits", query)]


@pytest.mark.parametrize(
    ("claim", "namespace", "spec", "place"),
    [
        ("team/data", "team", DATA, "."),
        ("team/data", "other", DATA, None),
        ("team/data", "team", {}, None),
        ("team/digits-shared", "team", {}, "."),
        ("team/data", "team", OWN, "jobs/digits"),
        ("*", "team", DATA, "team/data"),
        ("*", "team", {}, "team/digits-shared"),
        ("*", "other", OWN, "other/data/jobs/digits"),
        ("*", "..", DATA, None),
    ],
)
def test_the_folder_of_a_job_follows_from_its_namespace_its_claim_and_its_name(
    folder: Folder, claim: str, namespace: str, spec: dict[str, Any], place: str | None
) -> None:
    found = Volumes.at(folder.root, claim).of_job(namespace, "digits", spec)
    assert (found and found.root) == (place and folder.root / place)


@pytest.mark.parametrize(
    ("place", "claim", "said"),
    [
        ("none", "team/data", "--shared .*/none: no such folder; name the one where the volume is mounted"),
        (".", "data", "--volume-of data: give NAMESPACE/CLAIM, or '\\*'"),
        (".", "team/../x", "--volume-of team/../x: give NAMESPACE/CLAIM"),
    ],
)
def test_what_cannot_be_a_volume_is_refused(folder: Folder, place: str, claim: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Volumes.at(folder.root / place, claim)


async def test_logs_losses_and_snapshots_outlive_the_pods(folder: Folder) -> None:
    printed(folder, "digits-0-0", "of the first attempt")
    printed(folder, "digits-1-0", "[local rank 1] one", "zero")
    printed(folder, "digits-1-1", "four")
    folder.losses("digits", 1, 0, [3.0, 2.0, 1.0], rate=800.0)
    folder.snapshot("digits", 2)
    found = with_volume(NoPods(job()), folder)
    shown = await detail(NoPods(), found)
    assert texts(shown.log) == [(1, "one"), (0, "zero"), (4, "four")]
    assert [(row.name, row.attempt, row.state) for row in shown.pods] == [
        ("digits-1-0", 1, "Gone"), ("digits-1-1", 1, "Gone"), ("digits-0-0", 0, "Gone")
    ]  # fmt: skip
    assert [point.samples_per_second for point in shown.course.kept] == [800.0] * 3
    assert [row.step for row in shown.snapshots] == [2]
    assert shown.log_elsewhere is None
    assert texts(await found.log("team", "digits", LogQuery(attempt=0))) == [(0, "of the first attempt")]
    assert texts(await found.log("team", "digits", LogQuery(rank=4))) == [(4, "four")]
    assert texts(await followed(found, LogQuery(attempt=0))) == [(0, "of the first attempt")]
    assert texts(await followed(found, LogQuery(tail=1))) == [(0, "zero"), (4, "four")]


async def test_pods_that_are_there_are_asked_and_not_the_volume(folder: Folder) -> None:
    printed(folder, "digits-1-0", "of the volume")
    server = ApiServer(job(phase="Running"), log=("2030-01-01T00:00:07Z of the pod",))
    server_pods = await server.list("", "pods")
    server_pods[0][0]["metadata"]["ownerReferences"][0]["uid"] = "uid-1"

    async def pods(path: str, resource: str, **query: str) -> tuple[list[dict[str, Any]], int]:
        return server_pods if resource == "pods" else await ApiServer.list(server, path, resource, **query)

    server.list = pods  # type: ignore[method-assign]
    found = with_volume(server, folder)
    shown = await detail(server, found)
    assert texts(shown.log) == [(0, "of the pod")]
    assert [row.name for row in shown.pods] == ["digits-1-0"]


async def test_logs_of_an_earlier_job_of_the_name_are_not_taken_for_those_of_this_one(folder: Folder) -> None:
    printed(folder, "digits-1-0", "of a job before", uid="uid-0")
    os.utime(printed(folder, "digits-0-0", "of a job before", uid="uid-0"), (START - 9, START - 9))
    os.utime(printed(folder, "digits-0-1", "of this one", uid="uid-1"), (START - 2, START - 2))
    printed(folder, "digits-5-0", "of a job before", uid="uid-0")
    found = with_volume(NoPods(job()), folder)
    shown = await detail(NoPods(), found)
    assert shown.log == ()
    assert [row.name for row in shown.pods] == ["digits-1-0", "digits-0-1"], "whose time is that of this job"
    assert [text for _, text in texts(await found.log("team", "digits", LogQuery(attempt=0)))] == ["of this one"]


async def test_a_new_job_does_not_show_what_happened_to_an_earlier_one_of_the_name(folder: Folder) -> None:
    folder.token("digits", 0, uid="uid-0", created=-90)
    folder.events("digits", {"event": "started", "time": START - 90}, {"event": "finished", "time": START - 10})
    folder.stacks("digits", "0", "of a job before\n", -60)
    server = NoPods(job(attempt=0, phase="Pending"))
    shown = await detail(server, with_volume(server, folder))
    assert (shown.began, shown.events, shown.stacks) == ({}, (), ())
    folder.token("digits", 0, uid="uid-1", created=1)
    folder.events("digits", {"event": "started", "time": START - 90}, {"event": "started", "time": START + 1})
    shown = await detail(server, with_volume(server, folder))
    assert ([row.reason for row in shown.events], list(shown.began)) == (["started"], [0])


@pytest.mark.parametrize(("claim", "place"), [("team/data", ""), ("team/data", "jobs/digits"), ("*", "team/data")])
async def test_a_job_that_is_gone_is_listed_and_has_a_page(folder: Folder, claim: str, place: str) -> None:
    volume = Folder(folder.root / place)
    printed(volume, "digits-0-0", "zero")
    volume.losses("digits", 0, 0, [3.0, 2.0])
    volume.events("digits", {"event": "started", "step": 0, "totalSteps": 2}, {"event": "finished", "step": 2})
    server = NoPods(item("other"))
    found = with_volume(server, folder, claim)
    listed = {(record.namespace, record.name): record.phase for record in await found.jobs()}
    assert listed == {("team", "other"): "Running", ("team", "digits"): "Succeeded"}
    shown = await detail(server, found)
    assert shown.answer.headline == "digits: the DDPJob is gone; this is what its volume has"
    assert [command.text for command in shown.commands] == ["ddpjob logs digits --claim data -n team"]
    assert texts(shown.log) == texts(await found.log("team", "digits", LogQuery())) == [(0, "zero")]
    assert texts(await followed(found, LogQuery())) == [(0, "zero")]
    assert await found.detail("elsewhere", "digits") is None
    async with TestClient(TestServer(make_app(found))) as client:
        for path in ("/", "/jobs/team/digits", "/jobs/team/digits/logs"):
            assert (await client.get(path)).status == 200, path


async def test_the_time_of_a_job_that_is_gone_is_not_that_of_the_first_one_of_its_name(folder: Folder) -> None:
    """Each writes its events to the same file."""
    events = ({"event": "started", "time": START - 9000}, {"event": "finished", "time": START + 60})
    folder.events("digits", *events)
    folder.token("digits", 0, uid="uid-0", created=-9010)
    folder.token("digits", 1, uid="uid-1")
    folder.token("digits", 2, uid="uid-1")
    found = with_volume(NoPods(), folder)
    shown = await detail(NoPods(), found)
    status = shown.job.status
    assert shown.job.created is not None
    assert status.start_time is not None
    assert status.completion_time is not None
    times = (shown.job.created, status.start_time, status.completion_time)
    assert [time.timestamp() - START for time in times] == [0, 10, 60]
    assert [row.reason for row in shown.events] == ["finished"]
    assert [record.created for record in await found.jobs()] == [shown.job.created]
    folder.events("digits", *events[:1], {"event": "finished", "time": START - 10})
    gone = await detail(NoPods(), with_volume(NoPods(), folder))
    assert (gone.job.phase, gone.job.status.completion_time) == ("Unknown", None), "it has noted nothing"


async def test_volumes_of_other_namespaces_than_the_shown_one_are_not(folder: Folder) -> None:
    printed(Folder(folder.root / "other/data"), "digits-0-0", "secret")
    found = with_volume(NoPods(), folder, "*")
    assert await found.jobs() == []
    assert await found.detail("other", "digits") is None
    assert await found.log("other", "digits", LogQuery()) is None


async def test_what_is_left_is_read_again_only_if_it_has_changed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.events("digits", {"event": "started", "step": 0})
    volumes = Volumes.at(folder.root, "team/data")
    (first,) = volumes.all_left(None, ())
    monkeypatch.setattr("ddpjob_operator.page.volumes.record_of", lambda *_: pytest.fail("it is read again"))
    assert volumes.all_left("team", ()) == [first]
    assert volumes.all_left("team", [("team", "digits")]) == []


@pytest.mark.parametrize(
    ("attempt", "phase", "text"),
    [
        (1, "Failed", "ddpjob logs digits -n team"),
        (0, "Pending", None),
    ],
)
async def test_without_a_volume_the_page_says_what_prints_the_logs_of_pods_that_are_gone(
    attempt: int, phase: str, text: str | None
) -> None:
    shown = await detail(NoPods(job(attempt, phase)))
    assert (shown.log_elsewhere and shown.log_elsewhere.text) == text
    async with TestClient(TestServer(make_app(source(NoPods(job(attempt, phase)))))) as client:
        for path in ("/jobs/team/digits", "/jobs/team/digits/logs"):
            page = await (await client.get(path)).text()
            assert ("the volume is not mounted here" in page) == (text is not None)
            assert (f'data-copy="{text}"' in page) == (text is not None)


async def test_of_an_earlier_attempt_the_command_names_it() -> None:
    found = item()
    found["status"]["startTime"] = "2030-01-01T00:00:01Z"
    shown = await detail(ApiServer(found))
    assert shown.log_elsewhere is not None
    assert shown.log_elsewhere.text == "ddpjob logs digits --attempt 0 -n team"


async def test_a_job_that_is_gone_without_a_volume_is_said_where_its_logs_may_be() -> None:
    async with TestClient(TestServer(make_app(source(NoPods())))) as client:
        answer = await client.get("/jobs/team/digits")
        assert answer.status == 404
        assert "ddpjob logs digits -n team prints its logs if its volume is left" in await answer.text()
