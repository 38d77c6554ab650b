"""What `why` reads of a job: of one that runs, also what its pods say of their ranks."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from tests.unit.answers import Server, ok, status

from ddpjob_operator.follow.rank_reports import REFUSED
from ddpjob_operator.follow.read import read_job, see
from ddpjob_operator.follow.reader import read_claim
from ddpjob_operator.follow.why import why
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError

POD = {
    "metadata": {
        "name": "train-0-0", "namespace": "team", "uid": "pod-1",
        "labels": {"training.ddpjob.io/attempt": "0", "training.ddpjob.io/node-rank": "0"},
        "ownerReferences": [{"uid": "job-1", "controller": True}],
    },
    "spec": {"nodeName": "worker-1", "containers": [{"name": "trainer"}]},
    "status": {"phase": "Running", "containerStatuses": [{"name": "trainer", "ready": True, "state": {"running": {}}}]},
}  # fmt: skip
RANKS = [{"rank": rank, "phase": "train", "step": 7, "stepSeconds": 0.1, "dataSeconds": 0.05 * rank} for rank in (0, 1)]
FORBIDDEN = {"kind": "Status", "reason": "Forbidden", "message": "no"}


@pytest.mark.parametrize(
    ("phase", "refused", "told"),
    [
        ("Running", False, ("the others wait for rank 1 of pod train-0-0 on node worker-1", "Load data with more")),
        ("Running", True, (REFUSED,)),
        ("Starting", False, ()),
    ],
)
async def test_a_job_that_runs_is_asked_what_slows_it(
    server: Server, client: Client, phase: str, refused: bool, told: tuple[str, ...]
) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/pods/train-0-0:9400/proxy/status"):
            asked.append(request.path)
            said: dict[str, Any] = {"version": 1, "uid": "job-1", "attempt": 0, "ranks": RANKS}
            return web.json_response(FORBIDDEN, status=403) if refused else web.json_response(said)
        if "/ddpjobs/" in request.path:
            metadata = {"name": "train", "namespace": "team", "uid": "job-1"}
            return ok({"metadata": metadata, "spec": {"nodes": 1}, "status": {"phase": phase, "attempt": 0}})
        items = [POD] if request.path.endswith("/pods") else []
        return ok({"metadata": {"resourceVersion": "1"}, "items": items})

    server.answers = [answer]
    text = why(await see(client, "team", "train")).text()
    assert len(asked) == (phase == "Running")
    for part in told:
        assert part in text


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../digits", "../../../namespaces/other/ddpjobs/digits", "digits?a=1", "digits/status", "D"]
)
async def test_a_name_that_no_object_can_have_is_that_of_none_and_leads_nowhere_else(
    server: Server, client: Client, name: str
) -> None:
    job = {"metadata": {"name": "digits", "namespace": "team", "uid": "job-1"}}

    async def answer(request: web.Request) -> web.StreamResponse:
        listed = request.path.endswith("/namespaces/team/ddpjobs") and "limit" in request.query
        return ok({"metadata": {"resourceVersion": "1"}, "items": [job]} if listed else job)

    server.answers = [answer]
    with pytest.raises(ApiError, match=r"there is no DDPJob .*; it has digits") as refused:
        await read_job(client, "team", name)
    assert refused.value.not_found
    assert len(server.asked) == 1
    with pytest.raises(ApiError, match="there is no claim") as refused:
        await read_claim(client, "team", name)
    assert refused.value.not_found
    with pytest.raises(ApiError, match="there is no namespace") as refused:
        await read_job(client, f"{name}.", "digits")
    assert refused.value.not_found
    assert len(server.asked) == 1


async def test_a_job_that_is_not_there_is_answered_with_those_that_are(server: Server, client: Client) -> None:
    job = {"metadata": {"name": "digits", "namespace": "team", "uid": "job-1"}}
    server.answers = [status(404, "NotFound"), ok({"metadata": {"resourceVersion": "1"}, "items": [job]})]
    with pytest.raises(ApiError, match="there is no DDPJob train in namespace team; it has digits"):
        await read_job(client, "team", "train")
