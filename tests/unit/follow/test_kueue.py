"""`ddpjob why` of a job that waits in Kueue, with a server that answers as Kueue's API is documented to."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from tests.unit.answers import Server, ok, status

from ddpjob_operator.follow.read import see
from ddpjob_operator.follow.why import Answer, why
from ddpjob_operator.runtime.client import Client

GATED_POD: dict[str, Any] = {
    "metadata": {
        "name": "train-0-0", "namespace": "team", "uid": "pod-1",
        "labels": {
            "training.ddpjob.io/attempt": "0", "training.ddpjob.io/node-rank": "0",
            "kueue.x-k8s.io/queue-name": "team-a", "kueue.x-k8s.io/pod-group-name": "train-0-0",
        },
        "annotations": {"kueue.x-k8s.io/pod-group-total-count": "2"},
        "ownerReferences": [{"uid": "job-1", "controller": True}],
    },
    "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}], "containers": [{"name": "trainer"}]},
    "status": {"phase": "Pending", "conditions": [{
        "type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "Scheduling is blocked",
    }]},
}  # fmt: skip
QUOTA = "couldn't assign flavors to pod set trainer: insufficient unused quota for nvidia.com/gpu in flavor a100"
UNKNOWN = web.Response(status=404, text="404 page not found\n")
WORKLOAD = "/apis/kueue.x-k8s.io/v1beta2/namespaces/team/workloads/train-0-0"
PENDING = "/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/team/localqueues/team-a/pendingworkloads"


def workload(*conditions: dict[str, Any], **more: Any) -> web.Response:
    return ok({"kind": "Workload", "metadata": {"name": "train-0-0"}, "status": {"conditions": conditions, **more}})


def lacks_quota(message: str = QUOTA) -> web.Response:
    return workload({"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": message})


def pending(*names: str, in_cluster_queue: int = 0) -> web.Response:
    """So many Workloads of the LocalQueue; each waits behind `in_cluster_queue` others of other LocalQueues."""
    items = [
        {
            "metadata": {"name": name, "namespace": "team", "creationTimestamp": "2030-01-01T12:00:00Z"},
            "priority": 0,
            "localQueueName": "team-a",
            "positionInClusterQueue": in_cluster_queue + number,
            "positionInLocalQueue": number,
        }
        for number, name in enumerate(names)
    ]
    return ok({"kind": "PendingWorkloadsSummary", "metadata": {"creationTimestamp": None}, "items": items})


def forbidden(what: str) -> web.Response:
    return status(403, "Forbidden", f'{what} is forbidden: User "ada" cannot get resource')


def missing(resource: str, name: str) -> web.Response:
    body = {"kind": "Status", "reason": "NotFound", "message": f'{resource} "{name}" not found', "code": 404}
    return web.json_response(body | {"details": {"name": name, "kind": resource}}, status=404)


async def ask(
    server: Server, client: Client, of_kueue: dict[str, web.Response], pod: dict[str, Any] = GATED_POD
) -> Answer:
    """What `why` says where Kueue answers so by path, and knows no other path."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if "kueue.x-k8s.io" in request.path:
            found = of_kueue.get(request.path, UNKNOWN)
            return web.Response(status=found.status, body=found.body, headers=found.headers)
        if "/ddpjobs/" in request.path:
            metadata = {"name": "train", "namespace": "team", "uid": "job-1"}
            spec = {"nodes": 2, "scheduling": {"gang": "Kueue", "queue": "team-a"}}
            return ok({"metadata": metadata, "spec": spec, "status": {"phase": "Starting", "attempt": 0}})
        items = [pod] if request.path.endswith("/pods") else []
        return ok({"metadata": {"resourceVersion": "1"}, "items": items})

    server.answers = [answer]
    return why(await see(client, "team", "train"))


async def test_a_job_in_a_queue_has_its_place_and_the_reason_in_kueues_words(server: Server, client: Client) -> None:
    others = [f"other-{number}" for number in range(6)]
    waiting = pending(*others[:2], "train-0-0", *others[2:], in_cluster_queue=9)
    answer = await ask(server, client, {WORKLOAD: lacks_quota(), PENDING: waiting})
    assert answer.headline.endswith("waits in Kueue's queue team-a: place 3 of 7 (place 12 in the cluster queue)")
    found = {section.title: section.lines for section in answer.sections}
    assert found["Kueue"] == (QUOTA,)
    assert found["What to do"] == ("Wait for the queue.",)


async def test_an_older_kueue_is_asked_in_its_version(server: Server, client: Client) -> None:
    served = {WORKLOAD: lacks_quota(), PENDING: pending("train-0-0")}
    answer = await ask(server, client, {path.replace("v1beta2", "v1beta1"): said for path, said in served.items()})
    assert "place 1 of 1 (place 1 in the cluster queue)" in answer.headline
    assert QUOTA in answer.text()


@pytest.mark.parametrize(
    ("position", "place"), [(999, "place 1000 of 1000 or more (place 1000 in"), (None, "behind the first 1000")]
)
async def test_of_a_long_queue_kueue_lists_the_first_thousand(
    server: Server, client: Client, position: int | None, place: str
) -> None:
    names = [f"other-{number}" for number in range(1000)]
    if position is not None:
        names[position] = "train-0-0"
    answer = await ask(server, client, {WORKLOAD: lacks_quota(), PENDING: pending(*names)})
    assert f"queue team-a: {place}" in answer.headline


async def test_with_its_quota_reserved_the_admission_checks_are_what_it_waits_for(
    server: Server, client: Client
) -> None:
    checks = [
        {"name": "license", "state": "Ready", "message": ""},
        {"name": "autoscaler", "state": "Pending", "message": "Waiting for a node group\nto grow"},
    ]
    reserved = workload({"type": "QuotaReserved", "status": "True", "message": "reserved"}, admissionChecks=checks)
    answer = await ask(server, client, {WORKLOAD: reserved, PENDING: pending()})
    assert answer.headline.endswith("waits in Kueue's queue team-a")
    assert "checks that are not ready: autoscaler: Waiting for a node group to grow" in answer.text()
    assert "license" not in answer.text()


NO_RIGHTS = (
    "What Kueue says of it cannot be read: ask for get on workloads of kueue.x-k8s.io and "
    "localqueues/pendingworkloads of visibility.kueue.x-k8s.io, which Kueue's ClusterRole kueue-batch-user-role has."
)
NO_PLACE = "Its place is not known: the cluster does not serve Kueue's visibility API, visibility.kueue.x-k8s.io."


@pytest.mark.parametrize(
    ("of_kueue", "lines"),
    [
        pytest.param({WORKLOAD: lacks_quota()}, (QUOTA, NO_PLACE), id="no visibility API"),
        pytest.param({WORKLOAD: forbidden("workloads"), PENDING: forbidden("localqueues")}, (NO_RIGHTS,), id="403"),
        pytest.param(
            {WORKLOAD: lacks_quota(), PENDING: forbidden("localqueues")},
            (QUOTA, NO_RIGHTS.replace("workloads of kueue.x-k8s.io and ", "")),
            id="403 of the place",
        ),
        pytest.param(
            {WORKLOAD: missing("workloads.kueue.x-k8s.io", "train-0-0"), PENDING: pending()},
            (
                "Kueue has no Workload train-0-0 yet: it makes one when all 2 pods of the group are there, if its "
                "integration of pods covers namespace team.",
            ),
            id="no Workload",
        ),
        pytest.param(
            {WORKLOAD: lacks_quota("LocalQueue team-a doesn't exist"), PENDING: missing("localqueue", "team-a")},
            (
                "LocalQueue team-a doesn't exist",
                "Kueue has no LocalQueue team-a in namespace team that leads to a ClusterQueue: create it, or correct "
                "spec.scheduling.queue.",
            ),
            id="no LocalQueue",
        ),
        pytest.param(
            {WORKLOAD: lacks_quota(), PENDING: status(503, "ServiceUnavailable", "unable to handle the request")},
            (QUOTA, "Its place is not known, as Kueue's visibility API answers: unable to handle the request"),
            id="visibility API down",
        ),
        pytest.param(
            {},
            (
                "The cluster does not serve Workloads of kueue.x-k8s.io, so nothing admits these pods: install Kueue, "
                "or apply the job without scheduling.gang Kueue.",
            ),
            id="no Kueue",
        ),
    ],
)
async def test_what_kueue_does_not_answer_is_said_in_a_line_and_nothing_else_fails(
    server: Server, client: Client, of_kueue: dict[str, web.Response], lines: tuple[str, ...]
) -> None:
    answer = await ask(server, client, of_kueue)
    assert answer.headline.endswith("waits in Kueue's queue team-a")
    assert {section.title: section.lines for section in answer.sections}["Kueue"] == lines


@pytest.mark.parametrize(
    ("part", "of_pod"),
    [
        ("spec", {"schedulingGates": [], "containers": [{"name": "trainer"}]}),
        ("spec", {"schedulingGates": [{"name": "example.com/other"}]}),
        ("metadata", GATED_POD["metadata"] | {"deletionTimestamp": "2030-01-01T12:00:00Z"}),
    ],
)
async def test_kueue_is_asked_only_while_it_holds_a_pod(
    server: Server, client: Client, part: str, of_pod: dict[str, Any]
) -> None:
    answer = await ask(server, client, {}, GATED_POD | {part: of_pod})
    assert [request.path for request in server.asked if "kueue" in request.path] == []
    assert "Kueue" not in answer.text()
