"""The end of a job is posted to a webhook, at least once, across restarts of the operator."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import Cluster, Object
from tests.support.waiting import eventually_async

from ddpjob_operator.cluster import paths

TOKEN, PATH = "token-Zq8vT4", "path-Zq8vT4"
GIVEN_UP = "is not sent again"


@dataclass
class Receiver:
    url: str = ""
    code: int = 503
    refused: int = 0
    taken: list[Object] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    async def answer(self, request: web.Request) -> web.Response:
        if self.code == 204:
            self.taken.append(await request.json())
            self.headers = dict(request.headers)
        else:
            self.refused += 1
        return web.Response(status=self.code)

    def ids(self) -> list[str]:
        return [event["id"] for event in self.taken]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    found, app = Receiver(), web.Application()
    app.router.add_post(f"/{PATH}", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/{PATH}"
    yield found
    await runner.cleanup()


async def ends(cluster: Cluster, name: str, code: int = 0, **spec: object) -> str:
    """Apply a job of one node that ends; its uid."""
    job = await cluster.apply_job(name, nodes=1, restart={"maxRestarts": 0}, **spec)
    (pod,) = [pod["metadata"]["name"] for pod in await cluster.gang_exists(nodes=1, job=name)]
    await cluster.runs(pod)
    await cluster.phase_is("Running", name)
    await cluster.ends(pod, code=code)
    return str(job["metadata"]["uid"])


async def recorded(cluster: Cluster, outcome: str, name: str) -> None:
    async def found() -> bool:
        return (await cluster.status(name)).get("internal", {}).get("notification") == outcome

    await eventually_async(found, f"the notification of {name} is {outcome}")


async def test_the_end_of_a_job_is_notified_at_least_once_and_what_was_delivered_is_not_sent_again(
    cluster: Cluster, start_operator: StartOperator, receiver: Receiver
) -> None:
    settings = {"NOTIFY_URL": receiver.url, "NOTIFY_TOKEN": TOKEN}
    first = await start_operator(**settings)
    uid = await ends(cluster, "digits")
    await cluster.phase_is("Succeeded")

    async def tried() -> bool:
        return receiver.refused > 0

    await eventually_async(tried, "the receiver has refused it")
    await first.kill()
    await recorded(cluster, "Pending", "digits")

    receiver.code = 204
    second = await start_operator(**settings)
    await recorded(cluster, "Delivered", "digits")
    assert receiver.ids() == [f"{uid}-Succeeded"]
    assert receiver.headers["Content-Type"].startswith("application/cloudevents+json")
    assert receiver.headers["Authorization"] == f"Bearer {TOKEN}"
    assert await second.stop() == 0

    third = await start_operator(**settings)
    of_failed = await ends(cluster, "broken", code=1)
    await recorded(cluster, "Delivered", "broken")
    short_lived = await ends(cluster, "short", ttlSecondsAfterFinished=0)

    jobs = paths.jobs(cluster.namespace)

    async def gone() -> bool:
        return "short" not in [job["metadata"]["name"] for job in (await cluster.client.list(jobs, "ddpjobs"))[0]]

    async def all_taken() -> bool:
        return len(receiver.taken) >= 3

    await eventually_async(all_taken, "the end of a job that is deleted at once is notified too")
    await eventually_async(gone, "and it is deleted")
    assert receiver.ids() == [f"{uid}-Succeeded", f"{of_failed}-Failed", f"{short_lived}-Succeeded"]
    data = receiver.taken[1]["data"]
    assert (data["name"], data["phase"], data["namespace"]) == ("broken", "Failed", cluster.namespace)
    status = await cluster.status("broken")
    assert data["message"] in json.dumps(status["conditions"], ensure_ascii=False)
    assert 'ddpjob_operator_notifications_total{result="delivered"} 2.0' in await third.metrics()
    for operator in (first, second, third):
        text = operator.log.read_text()
        assert PATH not in text, "at the level DEBUG"
        assert TOKEN not in text
        assert GIVEN_UP not in text
