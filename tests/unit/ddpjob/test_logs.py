"""`job.logs()` and `ddpjob logs` of a job whose pods are gone: both read its volume, with the same code."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from typing import Any

import pytest
from aiohttp import web
from tests.support.waiting import eventually
from tests.unit.answers import Server, ok

from ddpjob import AsyncJob, Job
from ddpjob.sync import run
from ddpjob_operator.cli.logs import show_logs
from ddpjob_operator.cli.on_cluster import FAILED, REFUSED, SUCCEEDED, Cluster
from ddpjob_operator.follow.job_lines import Volume
from ddpjob_operator.follow.logs import Wanted
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError

PREFIX = "/api/v1/namespaces/default"
READ = ["[rank 0] step 1", "[rank 1] step 1"]


class Api:
    """An API server with a job that has ended, its claim, and a kubelet that runs the pod that reads the volume."""

    def __init__(self, server: Server, phase: str = "Succeeded") -> None:
        metadata = {"name": "train", "namespace": "default", "uid": "u", "creationTimestamp": "2030-01-01T00:00:00Z"}
        self.job: dict[str, Any] | None = {"metadata": metadata, "spec": {"nodes": 2}, "status": {"phase": phase}}
        annotations = {"training.ddpjob.io/trainer-image": "trainer:1"}
        self.claims = {"train-shared": annotations, "mine": {}}
        self.log, self.code, self.gone = READ, 0, threading.Event()
        self.readers: dict[str, dict[str, Any]] = {}
        server.answers = [self.answer]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path, name = request.path, request.path.rpartition("/")[2]
        if request.method == "POST":
            body = await request.json()
            self.readers[body["metadata"]["name"]] = body
            return ok(body)
        if request.method == "DELETE":
            del self.readers[name]
            self.gone.set()
            return ok({})
        if path.endswith("/log"):
            return web.Response(text="".join(f"2030-01-01T00:00:0{n}Z {line}\n" for n, line in enumerate(self.log)))
        found: dict[str, Any] | None = None
        if "/ddpjobs/" in path:
            found = self.job
        elif "/persistentvolumeclaims/" in path and name in self.claims:
            found = {"metadata": {"name": name, "namespace": "default", "uid": "c", "annotations": self.claims[name]}}
        elif name in self.readers:
            ended = {"name": "logs", "state": {"terminated": {"exitCode": self.code}}}
            found = self.readers[name] | {"status": {"phase": "Succeeded", "containerStatuses": [ended]}}
        elif path == f"{PREFIX}/pods" or path.endswith("/ddpjobs"):
            found = {"metadata": {"resourceVersion": "1"}, "items": []}
        missing = {"kind": "Status", "reason": "NotFound", "message": f"{name} not found"}
        return web.json_response(missing, status=404) if found is None else ok(found)


@pytest.fixture
def api(server: Server, client: Client) -> Api:
    """The client logs in by the kubeconfig of its fixture."""
    return Api(server)


async def get() -> AsyncJob:
    return await AsyncJob.get("train", namespace="default")


@pytest.mark.parametrize("follow", [True, False])
async def test_a_job_that_has_ended_is_read_from_its_volume_when_its_pods_are_gone(api: Api, follow: bool) -> None:
    async with await get() as job:
        lines = [(line.node, str(line)) async for line in job.logs(follow=follow)]
        assert lines == [(0, READ[0]), (1, READ[1])]
        assert (api.gone.is_set(), api.readers) == (True, {})


def lines_of(**wanted: Any) -> list[str]:
    with Job.get("train", namespace="default") as job:
        return [str(line) for line in job.logs(**wanted)]


async def test_without_asyncio_it_is_the_same(api: Api) -> None:
    assert await asyncio.to_thread(lines_of, rank=1, grep="step") == READ
    assert (api.gone.is_set(), api.readers) == (True, {})


async def test_lines_are_chosen_in_the_pod_which_has_the_image_that_is_named(api: Api) -> None:
    async with await get() as job:
        lines = job.logs(rank=1, grep="lo.s", image="mine:2")
        await anext(lines)
        ((container,),) = (reader["spec"]["containers"] for reader in api.readers.values())
        assert container["image"] == "mine:2"
        assert container["args"][2:] == ["--attempt=0", "--rank=1", "--grep=lo.s"]
        await lines.aclose()
        assert api.readers == {}, "whoever stops early has the pod deleted"


async def test_a_job_that_is_gone_is_read_from_the_claim_that_was_made_for_it_or_that_is_named(api: Api) -> None:
    async with await get() as job:
        api.job = None
        assert [str(line) async for line in job.logs()] == READ
        with pytest.raises(ApiError, match="nor the claim mine says which image"):
            await anext(job.logs(claim="mine"))
        assert [str(line) async for line in job.logs(claim="mine", image="mine:2")] == READ


async def test_without_a_claim_it_is_the_job_that_is_unknown(api: Api) -> None:
    async with await get() as job:
        api.job, api.claims = None, {}
        with pytest.raises(ApiError, match="there is no DDPJob train in namespace default"):
            await anext(job.logs())


async def test_a_volume_without_logs_of_the_job_is_an_error(api: Api) -> None:
    api.log, api.code = ["error: the volume has no logs of pods of train; it has none of any job"], 2
    async with await get() as job:
        with pytest.raises(ApiError, match="the volume has no logs of pods of train"):
            await anext(job.logs())
        assert api.readers == {}


FAILURE = {"attempt": 0, "time": "2030-01-01T00:00:00Z", "reason": "WorkerException", "message": "", "logTail": "tail"}


@pytest.mark.parametrize(
    ("status", "code", "follow", "exit_code", "printed"),
    [
        ({"phase": "Succeeded"}, 0, False, SUCCEEDED, READ),
        ({"phase": "Succeeded"}, 0, True, SUCCEEDED, READ),
        ({"phase": "Failed"}, 0, False, SUCCEEDED, READ),
        ({"phase": "Failed"}, 0, True, FAILED, READ),
        ({"phase": "Suspended"}, 0, False, SUCCEEDED, READ),
        (None, 0, True, SUCCEEDED, READ),
        ({"phase": "Failed", "lastFailure": FAILURE}, 2, False, REFUSED, ["tail"]),
        ({"phase": "Running"}, 0, False, SUCCEEDED, []),
    ],
)
async def test_the_command_prints_the_same_lines_and_its_exit_code_is_of_the_job_that_it_follows(
    api: Api,
    capsys: pytest.CaptureFixture[str],
    status: dict[str, Any] | None,
    code: int,
    follow: bool,
    exit_code: int,
    printed: list[str],
) -> None:
    api.job = None if status is None or api.job is None else api.job | {"status": status}
    api.code = code
    if code:
        api.log = ["error: the volume has no logs of pods of train"]
    cluster = Cluster(namespace="default")
    assert await asyncio.to_thread(show_logs, cluster, "train", Wanted(), follow, Volume()) == exit_code
    said = capsys.readouterr()
    assert said.out.splitlines() == printed
    assert ("a short-lived pod reads the logs" in said.err) is bool(printed)
    if code:
        assert said.err.endswith("error: the volume has no logs of pods of train\n")


def test_ctrl_c_waits_for_what_is_left_to_clean_up() -> None:
    began, cleaned = threading.Event(), threading.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)  # such as the deletion of the pod
            cleaned.set()

    main = threading.main_thread().ident or 0

    def waits() -> bool:
        return sys._current_frames()[main].f_code.co_name == "wait"

    def interrupt() -> None:
        began.wait()
        eventually(waits, "the caller waits for the result")
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(work())
    assert cleaned.is_set()
