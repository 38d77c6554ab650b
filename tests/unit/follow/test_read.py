"""What `why` reads of a job: of one that runs, also what its pods say of their ranks."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from tests.unit.answers import Server, ok

from ddpjob_operator.follow.rank_reports import REFUSED
from ddpjob_operator.follow.read import see
from ddpjob_operator.follow.why import why
from ddpjob_operator.runtime.client import Client

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
