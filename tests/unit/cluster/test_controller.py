"""What a replica forgets when another one acts, what it counts of jobs that are gone, and which trainer it asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from tests.unit.answers import Server, ok, status
from tests.unit.cluster.lists import take_lists
from tests.unit.cluster.test_status import merged

from ddpjob_operator import metrics
from ddpjob_operator.api.status import DDPJobStatus, Goodput, Internal, NodeCount, Notification, Phase
from ddpjob_operator.cluster.cache import Cache, Listed
from ddpjob_operator.cluster.children import CLAIM
from ddpjob_operator.cluster.controller import Controller, _LastPass, trainer_of
from ddpjob_operator.cluster.owners import Key, Owner
from ddpjob_operator.cluster.status_poll import StatusPoller, Target
from ddpjob_operator.cluster.status_write import wire_form
from ddpjob_operator.core.values.actions import Event, Plan
from ddpjob_operator.core.values.job import Defaults, Problem
from ddpjob_operator.core.values.observed import Observed, PodPhase, PodView, Termination
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.events import EventRecorder

KEY = Key("ns", "digits")
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
async def controller(client: Client) -> AsyncIterator[Controller]:
    poller = StatusPoller()
    yield Controller(
        client=client,
        cache=Cache(),
        recorder=EventRecorder(client, "here"),
        defaults=lambda _: Defaults(),
        progress_seconds=1.0,
        enqueue=lambda _: None,
        poller=poller,
        leader=None,
        clock=lambda: NOON,
    )
    await poller.close()


async def test_a_refusal_is_forgotten_when_another_replica_leads(controller: Controller) -> None:
    last = controller._last[KEY] = _LastPass("job-1", rejected=Problem("QuotaExceeded", "exceeded quota"))
    controller.stand_down()
    assert (controller._last[KEY], last.rejected) == (last, None)


@pytest.mark.parametrize(("generation", "by"), [(2, 2), (3, None)], ids=["as it was", "edited meanwhile"])
async def test_a_spec_that_another_replica_may_have_replaced_is_not_gone_on_by(
    controller: Controller, generation: int, by: int | None
) -> None:
    """The edit before the broken one may have been followed by the other replica."""
    job = running("ns", nodes=2)
    broken = deepcopy(job)
    broken["spec"]["restart"] = {"scope": "Nowhere"}
    for number, obj in enumerate((job, broken), 1):
        obj["metadata"] |= {"generation": number, "resourceVersion": str(number)}
        controller.cache.put_job(obj)
        await controller._view(KEY)
    controller.stand_down()
    later = {"generation": generation, "resourceVersion": "3"}
    controller.cache.put_job(broken | {"metadata": broken["metadata"] | later})
    for _ in range(2):
        view = await controller._view(KEY)
        assert view is not None
        assert (view.job and view.job.spec.nodes) == by


async def test_nothing_is_asked_for_again_in_a_namespace_that_is_deleted(
    server: Server, controller: Controller
) -> None:
    job = running("ns", nodes=2, resources={})
    del job["status"]
    take_lists(controller.cache, "ns", [job], [], 7)
    message = "services is forbidden: unable to create new content in namespace ns because it is being terminated"

    async def refuse(request: web.Request) -> web.Response:
        if request.method == "POST":
            return status(403, "Forbidden", message)
        stored = job | {"status": (await request.json())["status"]} if request.method == "PUT" else job
        return ok(stored)

    server.answers = [refuse]
    assert await controller.reconcile(KEY) is None
    asked = [request.path for request in server.asked if request.method == "POST"]
    assert asked
    for _ in range(3):  # whatever the namespace loses next
        await controller.reconcile(KEY)
    assert [request.path for request in server.asked if request.method == "POST"] == asked


async def test_a_claim_that_has_lost_our_label_keeps_no_gang_from_its_pods(
    server: Server, controller: Controller
) -> None:
    """As by `kubectl label --overwrite`: the watch says DELETED, and the claim is there."""
    job, labels = running("ns", nodes=2, resources={}) | {"status": {}}, {"training.ddpjob.io/job": "digits"}
    claim = {"name": "digits-shared", "namespace": "ns", "uid": "claim-1", "resourceVersion": "9", "labels": labels}
    take_lists(controller.cache, "ns", [job], [], 7)
    controller.cache.drop_child(CLAIM, {"metadata": claim})
    versions = iter(range(10, 1000))

    async def api(request: web.Request) -> web.Response:
        if request.path.endswith("/digits-shared"):
            return ok({"metadata": claim})
        if request.path.endswith("/persistentvolumeclaims"):
            return status(409, "AlreadyExists", "it exists")
        body = await request.json() if request.can_read_body else {}
        version = {"resourceVersion": str(next(versions))}
        if "ddpjobs" in request.path:
            job["metadata"], job["status"] = job["metadata"] | version, merged(job["status"], body.get("status", {}))
            return ok(job)
        made = {"metadata": body["metadata"] | version | {"uid": body["metadata"]["name"]}}
        return ok(body | made | {"spec": {"clusterIP": "10.0.0.9"} | body.get("spec", {})})

    server.answers = [api]
    await controller.reconcile(KEY)
    assert len([request for request in server.asked if request.path.endswith("/pods")]) == 2


async def test_a_spec_that_leaves_no_room_for_the_status_is_an_event(
    server: Server, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Event] = []
    monkeypatch.setattr(controller.recorder, "record", lambda about, event: recorded.append(event))
    take_lists(controller.cache, "ns", [running("ns") | {"status": {}}], [], 7)
    server.answers = [status(500, "InternalError", "etcdserver: request is too large")]
    with pytest.raises(ApiError, match="too large"):
        await controller.reconcile(KEY)
    assert [(event.type, event.reason) for event in recorded] == [("Warning", "TooLarge")]
    assert "shorten args, env or podTemplate" in recorded[0].message


async def test_a_deletion_that_is_refused_after_the_end_of_the_job_is_an_event(
    server: Server, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status of a job that is over never changes, and its pods hold their nodes."""
    recorded: list[Event] = []
    monkeypatch.setattr(controller.recorder, "record", lambda about, event: recorded.append(event))
    over = running("ns")
    over["status"] = wire_form(DDPJobStatus(phase=Phase.FAILED, completion_time=NOON))
    owner = {"kind": "DDPJob", "name": "digits", "uid": "job-1", "controller": True}
    labels = {"training.ddpjob.io/attempt": "0", "training.ddpjob.io/node-rank": "0"}
    names = {"name": "digits-0-0", "namespace": "ns", "uid": "pod-1", "resourceVersion": "5"}
    pod = {"metadata": names | {"ownerReferences": [owner], "labels": labels}, "status": {"phase": "Running"}}
    take_lists(controller.cache, "ns", [over], [pod], 7)

    async def refuse(request: web.Request) -> web.Response:
        if request.method == "DELETE":
            return status(403, "Forbidden", 'admission webhook "guard" denied the request: no deletions today')
        return ok(over)

    server.answers = [refuse]
    with pytest.raises(ApiError, match="no deletions today"):
        await controller.reconcile(KEY)
    assert [(event.type, event.reason) for event in recorded] == [("Warning", "Degraded")]
    assert "digits-0-0" in recorded[0].message


def restarts(namespace: str) -> float:
    found = metrics.REGISTRY.collect()
    samples = (one for family in found for one in family.samples if one.name == "ddpjob_operator_restarts_total")
    return sum(one.value for one in samples if one.labels["namespace"] == namespace)


@pytest.mark.parametrize("answer", [(504, "Timeout"), (500, "InternalError"), None], ids=["504", "500", "none"])
@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("lost", [1, 3])
async def test_a_restart_whose_write_was_not_answered_is_counted_once(
    server: Server,
    controller: Controller,
    monkeypatch: pytest.MonkeyPatch,
    applied: bool,
    lost: int,
    answer: tuple[int, str] | None,
) -> None:
    namespace = f"unanswered-{applied}-{lost}-{answer}".lower()
    job, reported, writes = running(namespace), list[str](), list[int]()
    monkeypatch.setattr(controller.recorder, "record", lambda about, event: reported.append(event.reason))
    key = Key(namespace, "digits")
    take_lists(controller.cache, namespace, [deepcopy(job)], [], 1)

    def write(body: dict[str, Any]) -> None:
        job["metadata"] = job["metadata"] | {"resourceVersion": str(int(job["metadata"]["resourceVersion"]) + 1)}
        job["status"] = merged(job["status"], body["status"])

    async def api(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return ok(job)
        body = await request.json()
        if not request.path.endswith("/status"):
            metadata = body["metadata"] | {"uid": request.path, "resourceVersion": "9"}
            return ok(body | {"metadata": metadata, "spec": {"clusterIP": "10.0.0.9"} | body.get("spec", {})})
        writes.append(1)
        is_current = body["metadata"]["resourceVersion"] == job["metadata"]["resourceVersion"]
        if is_current and (applied or len(writes) > lost):
            write(body)
        if len(writes) > lost:
            return ok(job) if is_current else status(409, "Conflict", "the object has been modified")
        if answer is not None:
            return status(*answer, "etcdserver: request timed out")
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    server.answers = [api]
    for second in range(lost):
        monkeypatch.setattr(controller, "clock", lambda now=NOON + timedelta(seconds=second): now)
        with pytest.raises(ApiError):
            await controller.reconcile(key)
    assert (restarts(namespace), reported) == (0, [])
    for _ in range(2):
        await controller.reconcile(key)
    assert (job["status"]["attempt"], job["status"]["restarts"]) == (1, 1)
    assert (restarts(namespace), reported.count("Restarting")) == (1, 1)


async def test_an_end_that_comes_with_a_refusal_is_notified(server: Server, controller: Controller) -> None:
    job, now, offered = running("ns", nodes=2, resources={}, startupDeadlineSeconds=60), [NOON], list[bytes]()
    job["status"] = {}
    versions = iter(range(8, 1000))

    def offer(_: str, document: Callable[[], bytes], done: Callable[[bool], None]) -> bool:
        offered.append(document())
        done(True)
        return True

    hook: Any = SimpleNamespace(offer=offer)
    controller.webhook, controller.clock = hook, lambda: now[0]
    take_lists(controller.cache, "ns", [job], [], 7)

    async def answer(request: web.Request) -> web.Response:
        """The pods are refused after a while, in which the deadline passes."""
        body = await request.json()
        if request.path.endswith("/pods"):
            now[0] += timedelta(seconds=10)
            return status(403, "Forbidden", 'admission webhook "x" denied the request: no')
        version = {"resourceVersion": str(next(versions))}
        if request.path.endswith("/status"):
            job["status"], job["metadata"] = merged(job["status"], body["status"]), job["metadata"] | version
            return ok(job)
        body["spec"] |= {"clusterIP": "10.96.0.7"} if body["kind"] == "Service" else {}
        return ok(body | {"metadata": body["metadata"] | version | {"uid": request.path}})

    server.answers = [answer]
    for seconds in (0, 55):
        now[0] = NOON + timedelta(seconds=seconds)
        with pytest.raises(ApiError, match="denied the request"):
            await controller.reconcile(KEY)
    assert (job["status"]["phase"], job["status"]["internal"].get("notification")) == ("Failed", Notification.PENDING)
    assert not offered
    await controller.reconcile(KEY)
    await controller.reconcile(KEY)
    assert len(offered) == 1
    assert job["status"]["internal"]["notification"] == Notification.DELIVERED


def running(namespace: str, **spec: object) -> dict[str, Any]:
    """A job of one node with 8 GPUs that has trained for 60 s."""
    status = DDPJobStatus(
        phase=Phase.RUNNING,
        nodes=NodeCount(total=1),
        goodput=Goodput(training=60.0, activity="training", last_update_time=NOON),
        internal=Internal(node_seconds={"training": 60.0}, gpu_seconds={"training": 480.0}),
    )
    metadata = {"name": "digits", "namespace": namespace, "uid": "job-1", "resourceVersion": "1"}
    gpus = {"nodes": 1, "resources": {"limits": {"nvidia.com/gpu": 8}}}
    return {
        "metadata": metadata | {"creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": gpus | spec,
        "status": wire_form(status),
    }


def counted_as_deleted(namespace: str) -> float:
    labels = {"namespace": namespace, "cause": "training", "outcome": "Deleted"}
    return metrics.REGISTRY.get_sample_value("ddpjob_gpu_seconds_total", labels) or 0.0


async def test_a_job_that_is_deleted_before_the_first_pass_over_it_is_counted_once(controller: Controller) -> None:
    cache, job = controller.cache, running("early")
    cache.put_job(job)
    cache.end_lists(None, Listed({"job-1"}, 1), Listed(set(), 1))
    assert cache.drop_job(job)
    for _ in range(2):
        await controller.reconcile(Key("early", "digits"))
    assert counted_as_deleted("early") == 480.0


async def test_a_job_that_was_gone_when_this_process_listed_is_counted_by_the_one_before(
    controller: Controller,
) -> None:
    cache, job = controller.cache, running("late")
    cache.put_job(job)
    cache.end_lists(None, Listed(set(), 2), Listed(set(), 2))
    await controller.reconcile(Key("late", "digits"))
    assert counted_as_deleted("late") == 0.0


async def test_a_job_of_another_controller_is_not_counted(controller: Controller) -> None:
    cache, job = controller.cache, running("others", managedBy="example.com/other")
    cache.put_job(job)
    cache.end_lists(None, Listed({"job-1"}, 1), Listed(set(), 1))
    cache.drop_job(job)
    await controller.reconcile(Key("others", "digits"))
    assert counted_as_deleted("others") == 0.0


@pytest.mark.parametrize("deposed", [False, True])
async def test_a_pass_that_outlives_the_leadership_asks_no_trainer_and_shows_no_job(
    server: Server, controller: Controller, deposed: bool
) -> None:
    key, owner, cache = Key("ns", "digits"), Owner("ns", "job-1"), controller.cache
    leader: Any = SimpleNamespace(leading=True, begin_pass=lambda: None)
    controller.leader = leader
    job = {
        "metadata": {"name": "digits", "namespace": "ns", "uid": "job-1", "resourceVersion": "5", "generation": 1},
        "spec": {"nodes": 1},
        "status": wire_form(DDPJobStatus(phase=Phase.STARTING, nodes=NodeCount(total=1))),
    }
    pod = {
        "metadata": {
            "name": "digits-0-0",
            "namespace": "ns",
            "uid": "pod-1",
            "resourceVersion": "6",
            "labels": {f"training.ddpjob.io/{name}": "0" for name in ("attempt", "node-rank")},
            "ownerReferences": [{"kind": "DDPJob", "name": "digits", "uid": "job-1", "controller": True}],
        },
        "spec": {"nodeName": "node-1"},
        "status": {"phase": "Running", "podIP": "127.0.0.1"},
    }
    take_lists(cache, "ns", [job], [pod], 7)
    child = {"metadata": {"name": "digits-rdzv", "namespace": "ns", "uid": "child-1", "resourceVersion": "4"}}
    selector = {"training.ddpjob.io/attempt": "0"}
    service = {"spec": {"clusterIP": "10.96.0.7", "ports": [{"port": 29500}], "selector": selector}}
    cache.put_service(owner, child | service)
    cache.put_child(owner, CLAIM, child)

    async def written(request: web.Request) -> web.Response:
        """The status has been written when another replica begins to lead."""
        if request.path.endswith("/status") and deposed:
            leader.leading = False
            controller.stand_down()
        kept = {"metadata": job["metadata"] | {"resourceVersion": "8"}, "spec": job["spec"]}
        return ok(kept | {"status": (await request.json()).get("status", {})} if request.can_read_body else kept)

    server.answers = [written]
    await controller.reconcile(key)
    shown = 'ddpjob="digits"' in (await metrics.page(""))[0].decode()
    asked = f"status of {key}" in {task.get_name() for task in asyncio.all_tasks()}
    assert (asked, shown) == (not deposed, not deposed)
    controller.stand_down()


def trainer(**status: Any) -> Observed:
    found: Any = PodView("digits-0-0", "pod-1", 0, 0, PodPhase.RUNNING, pod_ip="10.0.0.1")
    return Observed(pods=(replace(found, **status),))


@pytest.mark.parametrize(
    ("observed", "asked"),
    [
        (trainer(), True),
        (trainer(deleting=True), True),
        (trainer(deleting=True, termination=Termination(143)), False),
        (trainer(phase=PodPhase.PENDING), False),
        (trainer(node_rank=1), False),
        (trainer(attempt=1), False),
    ],
    ids=["it runs", "it saves and leaves", "it has left", "it waits", "another node", "another attempt"],
)
def test_node_rank_0_is_asked_while_it_runs(observed: Observed, asked: bool) -> None:
    target = trainer_of("job-1", DDPJobStatus(phase=Phase.RUNNING), observed)
    assert target == (Target("10.0.0.1", "job-1", 0) if asked else None)


def test_a_spare_in_the_place_of_a_lost_pod_is_asked_although_that_one_is_still_there() -> None:
    (old,) = trainer().pods
    status = DDPJobStatus(phase=Phase.RUNNING, internal=Internal(lost_pods={old.uid: 0}))
    observed = Observed(pods=(old, replace(old, name="digits-0-s0", uid="spare", pod_ip="10.0.0.9")))
    assert trainer_of("job-1", status, observed) == Target("10.0.0.9", "job-1", 0)


def test_another_pod_is_asked_until_a_new_node_rank_0_trains() -> None:
    """With live recovery the others train on meanwhile."""
    (lost,) = trainer(phase=PodPhase.FAILED).pods
    other = replace(lost, uid="pod-2", node_rank=2, phase=PodPhase.RUNNING, pod_ip="10.0.0.3")
    status = DDPJobStatus(phase=Phase.RUNNING, internal=Internal(lost_pods={lost.uid: 0}))
    assert trainer_of("job-1", status, Observed(pods=(lost, other))) == Target("10.0.0.3", "job-1", 0)
    new = replace(other, uid="pod-3", node_rank=0, phase=PodPhase.PENDING, pod_ip="10.0.0.4")
    assert trainer_of("job-1", status, Observed(pods=(new, other))) == Target("10.0.0.3", "job-1", 0)
    runs = replace(new, phase=PodPhase.RUNNING)
    asked = trainer_of("job-1", status, Observed(pods=(other, runs)))
    assert asked == Target("10.0.0.4", "job-1", 0, otherwise="10.0.0.3")


async def test_a_decision_knows_for_how_long_the_trainer_has_not_answered(
    server: Server, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, job, silent = controller.cache, running("silent"), []
    cache.put_job(job)
    cache.end_lists(None, Listed({"job-1"}, 1), Listed(set(), 1))
    monkeypatch.setattr(controller.poller, "silent_seconds", lambda key: 7.0 if key == Key("silent", "digits") else 0.0)

    def decide(job: Any, observed: Observed, *_: Any) -> Plan:
        silent.append(observed.silent_seconds)
        return Plan(job.status)

    monkeypatch.setattr("ddpjob_operator.cluster.controller.plan", decide)
    await controller.reconcile(Key("silent", "digits"))
    assert silent == [7.0]


async def test_a_job_that_went_while_this_replica_stood_by_is_not_counted_when_it_leads(controller: Controller) -> None:
    """Another one of its name came before the pass. The last leader has counted it, and this one would until now."""
    controller.leader = SimpleNamespace(leading=False, begin_pass=lambda: None)  # type: ignore[assignment]
    gone, new = running("ns"), running("ns")
    new["metadata"] = new["metadata"] | {"uid": "job-2", "resourceVersion": "9"}
    take_lists(controller.cache, "ns", [gone], [], 7)
    controller.cache.drop_job(gone)
    controller.cache.put_job(new)
    await controller.reconcile(KEY)
    assert controller.cache.take_dropped(KEY) is None
