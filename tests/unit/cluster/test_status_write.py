"""What a write of a status that the API server does not take says of the job."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from tests.unit.answers import Server, status

from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.owners import Key
from ddpjob_operator.cluster.status_write import Change, StatusWriter
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError

KEY = Key("ns", "digits")
JOB: dict[str, Any] = {"metadata": {"name": "digits", "namespace": "ns", "uid": "job-1", "resourceVersion": "7"}}
CHANGE = Change({"phase": "Running"})


@pytest.fixture
def writer(client: Client) -> StatusWriter:
    cache = Cache()
    cache.put_job(JOB)
    return StatusWriter(client, cache)


@pytest.mark.parametrize(
    "answer",
    [
        status(404, "NotFound", "the server could not find the requested resource"),
        web.Response(status=404, text="404 page not found"),
    ],
    ids=["no such kind", "no such path"],
)
async def test_a_server_that_does_not_serve_the_kind_yet_takes_no_job_away(
    server: Server, writer: StatusWriter, answer: web.Response
) -> None:
    """Kubernetes before 1.23 says so of every job while it starts; any, of a status that its CRD does not have."""
    obj = writer.cache.job(KEY)
    assert obj is not None
    server.answers = [answer]
    with pytest.raises(ApiError, match="404"):  # it is logged, and tried again
        await writer.write(KEY, obj, CHANGE)
    with pytest.raises(ApiError, match="404"):
        await writer.is_current(KEY, obj)
    assert writer.cache.job(KEY) is obj


async def test_a_job_that_is_gone_is_forgotten_at_once(server: Server, writer: StatusWriter) -> None:
    obj = writer.cache.job(KEY)
    assert obj is not None
    gone = {"kind": "Status", "code": 404, "reason": "NotFound", "details": {"name": "digits", "kind": "ddpjobs"}}
    server.answers = [web.json_response(gone, status=404)]
    assert not await writer.write(KEY, obj, CHANGE)
    assert writer.cache.job(KEY) is None
