"""How actions become calls, where a real API server cannot be made to answer as it does in trouble."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from tests.unit.answers import Answer, Server, ok, status

from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.cluster import apply, paths
from ddpjob_operator.cluster.apply import Applier
from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.children import Kind
from ddpjob_operator.cluster.owners import Key, Owner
from ddpjob_operator.core.values.actions import (
    Action,
    CreateChild,
    CreatePod,
    CreatePVC,
    CreateService,
    DeletePod,
    DeletePodGroup,
    Event,
    PointService,
    ReadLog,
    ReadWarnings,
    ReleasePod,
)
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.core.values.names import FINALIZER, LABEL_ATTEMPT, LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError

JOB = Job("digits", "ns", "job-1", 1, datetime(2026, 1, 1, tzinfo=UTC), DDPJobSpec(), DDPJobStatus())


async def tail(client: Client) -> str:
    cache = Cache()
    assert await Applier(client, cache).carry_out(JOB, [ReadLog("digits-0-1", "pod-1")]) is None
    return cache.observed(Owner("ns", "job-1")).logs["pod-1"]


async def test_the_end_of_a_log_is_read_from_the_trainer(server: Server, client: Client) -> None:
    server.answers = [web.Response(text="line\n" * 2000 + "ValueError: the last words\n")]
    text = await tail(client)
    assert text.startswith("line\n")
    assert text.endswith("line\nValueError: the last words\n")
    assert 4096 - len("line\n") <= len(text) <= 4096
    (request,) = server.asked
    assert request.path == "/api/v1/namespaces/ns/pods/digits-0-1/log"
    assert (request.query["container"], request.query["tailLines"]) == ("trainer", "40")


async def test_a_progress_bar_leaves_room_for_what_was_printed_before_and_after_it(
    server: Server, client: Client
) -> None:
    """The container runtime hands out its states in parts of 16 KiB, each of which is a line to the kubelet."""
    bar, printed = b"".join(b"\r%5d of 99999" % step for step in range(20_000)), []

    async def kubelet(request: web.Request) -> web.Response:
        printed.append(int(request.query["limitBytes"]))
        text = b"loss 0.5\n" + bar + b"\nTraceback\nValueError: the last words\n"
        return web.Response(body=text[: printed[0]])

    server.answers = [kubelet]
    assert await tail(client) == "loss 0.5\n19999 of 99999\nTraceback\nValueError: the last words\n"
    assert printed == [40 * 16 * 1024]


async def test_a_log_that_is_no_text_is_still_read(server: Server, client: Client) -> None:
    server.answers = [web.Response(body=b"\xff\x00ok")]
    assert (await tail(client)).endswith("ok")


@pytest.mark.parametrize(
    "answer",
    [
        status(404, "NotFound", "pods digits-0-1 not found"),
        status(403, "Forbidden", "pods/log"),
        status(500, "InternalError", "dial tcp 10.0.0.9:10250: connect: no route to host"),
        status(400, "BadRequest", "container trainer in pod digits-0-1 is waiting to start"),
    ],
    ids=lambda answer: str(answer.status),
)
async def test_a_log_that_cannot_be_read_is_empty_and_no_error(server: Server, client: Client, answer: Answer) -> None:
    server.answers = [answer]
    assert await tail(client) == ""


async def test_a_node_that_does_not_answer_holds_up_a_restart_for_a_moment_only(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    monkeypatch.setattr(apply, "LOG_SECONDS", 0.2)
    server.answers = [hang]
    assert await tail(client) == ""
    never.set()


@pytest.mark.parametrize(
    ("version", "kind", "path"),
    [
        ("v1", "Pod", "/api/v1/namespaces/ns/pods"),
        ("networking.k8s.io/v1", "NetworkPolicy", "/apis/networking.k8s.io/v1/namespaces/ns/networkpolicies"),
        ("scheduling.x-k8s.io/v1alpha1", "PodGroup", "/apis/scheduling.x-k8s.io/v1alpha1/namespaces/ns/podgroups"),
    ],
)
def test_a_kind_has_its_place_in_the_api(version: str, kind: str, path: str) -> None:
    assert paths.children(version, kind, "ns") == (path, path.rpartition("/")[2])


@pytest.mark.parametrize(
    "answer",
    [
        ok({"kind": "Status"}),
        status(404, "NotFound"),
        status(403, "Forbidden"),
        status(422, "Invalid"),
        status(500, "InternalError", 'failed calling webhook "a": no endpoints'),
        status(409, "Conflict", 'admission webhook "a" denied the request: not on Fridays'),
    ],
    ids=["gone", "was", "roles", "a policy", "a webhook that is down", "a webhook that denies"],
)
async def test_a_group_that_is_deleted_on_purpose_is_known_no_more_and_not_missed(
    server: Server, client: Client, answer: Answer
) -> None:
    """Also where roles of one's own forbid it: it would be asked for again and again."""
    cache, owner = Cache(), Owner("ns", "job-1")
    kind = Kind("scheduling.volcano.sh/v1beta1", "PodGroup")
    cache.put_child(owner, kind, {"metadata": {"name": "digits-0", "uid": "group-1", "resourceVersion": "7"}})
    assert cache.observed(owner).pod_groups == {("scheduling.volcano.sh/v1beta1", "digits-0")}
    server.answers = [answer]
    assert await Applier(client, cache).carry_out(JOB, [DeletePodGroup(kind.api_version, "digits-0")]) is None
    assert [(asked.method, asked.path.rpartition("/")[2]) for asked in server.asked] == [("DELETE", "digits-0")]
    assert cache.observed(owner).pod_groups == frozenset()
    assert not cache.is_lost(owner, kind, "digits-0")


async def test_the_warnings_of_one_pod_are_read_and_what_cannot_be_read_is_not_asked_again_at_once(
    server: Server, client: Client
) -> None:
    cache, read = Cache(), ReadWarnings("digits-0-1", "pod-1")
    event = {"reason": "FailedMount", "message": "no such volume"}
    listed = web.json_response({"metadata": {"resourceVersion": "7"}, "items": [event]})
    server.answers = [listed, status(403, "Forbidden", "events")]
    await Applier(client, cache).carry_out(JOB, [read])
    found = cache.observed(Owner("ns", "job-1")).warnings["pod-1"]
    assert (found.reason, found.message) == ("FailedMount", "no such volume")
    assert server.asked[0].path == "/api/v1/namespaces/ns/events"
    assert server.asked[0].query["fieldSelector"] == "involvedObject.uid=pod-1,type=Warning"
    await Applier(client, cache).carry_out(JOB, [read])
    after = cache.observed(Owner("ns", "job-1")).warnings["pod-1"]
    assert (after.reason, after.at >= found.at) == ("", True)


@pytest.mark.parametrize(
    "action",
    [DeletePod("digits-0-1", "pod-1", None), PointService("digits-rdzv", 1, {})],
    ids=["a deletion", "a change of the Service"],
)
async def test_a_change_that_a_policy_denies_is_told_to_the_author_of_the_job(
    server: Server, client: Client, action: Action
) -> None:
    message = 'admission webhook "policy.example" denied the request: not on Fridays'
    server.answers = [status(403, "Forbidden", message)]
    refused = await Applier(client, Cache()).carry_out(JOB, [action])
    assert refused is not None
    assert refused.problem.reason == "AdmissionDenied"
    assert refused.problem.message.endswith("not on Fridays")


SPEC = {"spec": {"clusterIP": "10.96.0.7", "ports": [{"port": 29500}]}}
SERVICE = {"kind": "Service", "metadata": {"name": "digits-rdzv", "uid": "service-1", "resourceVersion": "7"}}


async def test_no_pod_gets_the_address_of_a_service_that_is_gone(server: Server, client: Client) -> None:
    """The Service that is made anew has another."""
    cache = Cache()
    cache.put_service(Owner("ns", "job-1"), SERVICE | SPEC)
    server.answers = [status(404, "NotFound", "services digits-rdzv not found")]
    manifest = {"kind": "Pod", "metadata": {"name": "digits-1-0"}}
    actions = [CreatePod("digits-1-0", 1, 0, manifest), PointService("digits-rdzv", 1, {})]
    assert await Applier(client, cache).carry_out(JOB, actions) is None
    assert [request.method for request in server.asked] == ["PATCH"]
    assert cache.observed(Owner("ns", "job-1")).service is None


async def test_a_service_is_pointed_at_an_attempt_only_as_it_was_last_seen(server: Server, client: Client) -> None:
    """Else the call of a replica that leads no more, which arrives late, would undo what the next one has done."""
    cache, bodies = Cache(), []
    cache.put_service(Owner("ns", "job-1"), SERVICE | SPEC)

    async def keep(request: web.Request, answer: web.Response) -> web.Response:
        bodies.append(json.loads(await request.text()))
        return answer

    newer = ok(SERVICE | SPEC | {"metadata": SERVICE["metadata"] | {"resourceVersion": "9"}})
    refused = status(409, "Conflict", "the object has been modified")
    server.answers = [lambda request: keep(request, refused), newer, lambda request: keep(request, newer)]
    point = PointService("digits-rdzv", 1, {"training.ddpjob.io/attempt": "1"})
    assert await Applier(client, cache).carry_out(JOB, [point]) is None
    assert [request.method for request in server.asked] == ["PATCH", "GET", "PATCH"]
    assert [body["metadata"]["resourceVersion"] for body in bodies] == ["7", "9"]


QUOTA = status(403, "Forbidden", "exceeded quota: few")
OWNED = {"kind": "DDPJob", "name": "digits", "uid": "job-1", "controller": True}
NETWORK = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "digits"}}
CLAIM = {"kind": "PersistentVolumeClaim", "metadata": {"name": "digits-shared"}}


def found(manifest: dict[str, Any], *owners: dict[str, Any]) -> Answer:
    known = {"namespace": "ns", "uid": "child-1", "resourceVersion": "9"}
    metadata = manifest["metadata"] | known | {"ownerReferences": list(owners)}
    return ok(manifest | {"metadata": metadata} | SPEC)


@pytest.mark.parametrize(
    "refusal",
    [QUOTA, status(500, "InternalError", 'failed calling webhook "a": no endpoints')],
    ids=["a quota", "a webhook"],
)
@pytest.mark.parametrize("action", [CreateChild(NETWORK), CreateService(SERVICE), CreatePVC(CLAIM)])
async def test_what_exists_already_needs_no_admission(
    server: Server, client: Client, action: CreateChild | CreateService | CreatePVC, refusal: Answer
) -> None:
    """The API server asks quotas and webhooks before it looks for the name."""
    cache = Cache()
    server.answers = [refusal, found(action.manifest, OWNED)]
    assert await Applier(client, cache).carry_out(JOB, [action]) is None
    assert [request.method for request in server.asked] == ["POST", "GET"]
    known = cache.observed(Owner("ns", "job-1"))
    assert known.children or known.service or known.pvc_exists


@pytest.mark.parametrize("refusal", [status(409, "AlreadyExists"), QUOTA], ids=["exists", "a quota"])
@pytest.mark.parametrize(
    ("labels", "only_own", "used"),
    [({LABEL_JOB: "digits"}, True, True), ({LABEL_JOB: "other"}, True, False), ({}, True, False), ({}, False, True)],
    ids=["retained", "another job's", "nobody's", "any will do"],
)
async def test_a_claim_that_has_the_name_by_chance_is_not_used_where_jobs_see_their_own_files_only(
    server: Server, client: Client, labels: dict[str, str], refusal: Answer, *, only_own: bool, used: bool
) -> None:
    cache, metadata = Cache(), {"name": "digits-shared"}
    wanted = CLAIM | {"metadata": metadata | {"labels": {LABEL_JOB: "digits"}}}
    server.answers = [refusal, found(CLAIM | {"metadata": metadata | {"labels": labels}})]
    refused = await Applier(client, cache).carry_out(JOB, [CreatePVC(wanted, only_own=only_own)])
    assert cache.observed(Owner("ns", "job-1")).pvc_exists is used
    if used:
        assert refused is None
    else:
        assert refused is not None
        assert refused.problem.reason == "NameTaken"
        assert "was made for no job of this name" in refused.problem.message


@pytest.mark.parametrize(
    "answer",
    [status(404, "NotFound"), status(500, "InternalError"), found(NETWORK, OWNED | {"uid": "job-2"}), found(NETWORK)],
    ids=["missing", "unknown", "another job's", "nobody's"],
)
async def test_a_refusal_stands_where_the_job_has_no_such_child(server: Server, client: Client, answer: Answer) -> None:
    cache = Cache()
    server.answers = [QUOTA, answer]
    refused = await Applier(client, cache).carry_out(JOB, [CreateChild(NETWORK)])
    assert refused is not None
    assert refused.problem.reason == "QuotaExceeded"
    assert not cache.observed(Owner("ns", "job-1")).children


async def test_a_service_takes_another_address_where_its_own_is_taken(server: Server, client: Client) -> None:
    cache, bodies = Cache(), []

    async def keep(request: web.Request, answer: web.Response) -> web.Response:
        bodies.append(json.loads(await request.text()))
        return answer

    taken = status(422, "Invalid", "spec.clusterIPs: failed to allocate IP 10.96.0.7: provided IP is already allocated")
    server.answers = [lambda request: keep(request, taken), lambda request: keep(request, ok(SERVICE | SPEC))]
    assert await Applier(client, cache).carry_out(JOB, [CreateService(SERVICE | SPEC)]) is None
    assert [body["spec"].get("clusterIP") for body in bodies] == ["10.96.0.7", None]


def pod(**metadata: Any) -> dict[str, Any]:
    known = {
        "name": "digits-0-1",
        "namespace": "ns",
        "uid": "pod-1",
        "resourceVersion": "9",
        "ownerReferences": [OWNED],
    }
    return {"kind": "Pod", "metadata": known | metadata, "status": {}}


GOING = {"deletionTimestamp": "2026-01-02T03:04:05Z", "deletionGracePeriodSeconds": 30}


LABELS = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_ATTEMPT: "0", "team": "a"}
WANTED = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "digits-0-1", "labels": LABELS}}


@pytest.mark.parametrize("action", [CreatePod("digits-0-1", 0, 1, WANTED), CreateChild(WANTED)])
@pytest.mark.parametrize(
    ("labels", "lacking"),
    [
        ({LABEL_MANAGED_BY: "platform"}, f"label {LABEL_MANAGED_BY} and {LABEL_ATTEMPT}, and was deleted"),
        (LABELS | {LABEL_ATTEMPT: ""}, f"label {LABEL_ATTEMPT}, and was deleted"),
        (LABELS | {"team": "b"}, ""),
    ],
)
async def test_a_pod_that_a_policy_has_relabelled_is_deleted_since_no_watch_would_show_it(
    server: Server, client: Client, action: CreatePod | CreateChild, labels: dict[str, str], lacking: str
) -> None:
    cache = Cache()
    made, going = pod(labels=labels, finalizers=[FINALIZER]), pod(labels=labels, finalizers=[FINALIZER], **GOING)
    server.answers = [ok(made), ok(going), ok(pod(labels=labels, **GOING))]
    refused = await Applier(client, cache).carry_out(JOB, [action])
    assert [request.method for request in server.asked] == (["POST", "DELETE", "PATCH"] if lacking else ["POST"])
    assert len(cache.observed(Owner("ns", "job-1")).pods) == (0 if lacking else 1)
    if lacking:
        assert refused is not None
        assert refused.problem.reason == "AdmissionDenied"
        assert lacking in refused.problem.message
    assert bool(cache.observed(Owner("ns", "job-1")).creations) is not bool(lacking)


WHOLE = WANTED | {"spec": {"resources": {"limits": {"cpu": "4"}}}}


@pytest.mark.parametrize("spec", [{}, {"resources": {}}, {"resources": {"limits": {"memory": "1Gi"}}}])
async def test_no_pod_is_made_that_would_lack_the_limits_which_a_bound_counts_on(
    server: Server, client: Client, spec: dict[str, Any]
) -> None:
    """Before Kubernetes 1.34 an API server leaves those of a pod as a whole out, without an error."""
    server.answers = [ok(pod(labels=LABELS) | {"spec": spec})]
    refused = await Applier(client, Cache()).carry_out(JOB, [CreatePod("digits-0-1", 0, 1, WHOLE, whole=True)])
    assert [(request.method, request.query.get("dryRun")) for request in server.asked] == [("POST", "All")]
    assert refused is not None
    assert refused.problem.reason == "BeyondBounds"
    assert "Pod digits-0-1: the API server leaves out spec.podTemplate.spec.resources" in refused.problem.message


@pytest.mark.parametrize("whole", [True, False])
async def test_limits_that_the_api_server_keeps_are_enough(server: Server, client: Client, whole: bool) -> None:
    cache = Cache()
    server.answers = [ok(pod(labels=LABELS) | {"spec": WHOLE["spec"]})]
    assert await Applier(client, cache).carry_out(JOB, [CreatePod("digits-0-1", 0, 1, WHOLE, whole=whole)]) is None
    assert [request.query.get("dryRun") for request in server.asked] == (["All", None] if whole else [None])
    assert len(cache.observed(Owner("ns", "job-1")).pods) == 1


@pytest.mark.parametrize(
    ("given", "rank", "says"),
    [(50, 0, True), (50, 1, False), (60, 0, False), (90, 0, False), (None, 0, False)],
)
async def test_a_policy_that_takes_time_to_leave_away_is_told(
    server: Server, client: Client, given: int | None, rank: int, *, says: bool
) -> None:
    """Kyverno's mutate-large-termination-gps makes 50 s of all that is more: the ranks count on what they asked for."""
    told = list[Event]()
    action = CreatePod(f"digits-0-{rank}", 0, rank, WANTED | {"spec": {"terminationGracePeriodSeconds": 60}})
    server.answers = [ok(pod(labels=LABELS) | {"spec": {"terminationGracePeriodSeconds": given}})]
    assert await Applier(client, Cache(), lambda _, event: told.append(event)).carry_out(JOB, [action]) is None
    assert [event.reason for event in told] == (["GraceShortened"] if says else [])
    if says:
        assert "from 60 to 50" in told[0].message
        assert "shutdownSeconds to 35 or less" in told[0].message


async def test_a_pod_that_was_there_may_have_another_place_but_must_be_seen(server: Server, client: Client) -> None:
    action, exists = CreatePod("digits-0-1", 0, 1, WANTED), status(409, "AlreadyExists")
    server.answers = [exists, ok(pod(labels=LABELS | {LABEL_ATTEMPT: "1"}))]
    assert await Applier(client, Cache()).carry_out(JOB, [action]) is None
    server.answers = [exists, ok(pod()), ok(pod(**GOING))]
    refused = await Applier(client, Cache()).carry_out(JOB, [action])
    assert refused is not None
    assert LABEL_MANAGED_BY in refused.problem.message


async def test_a_pod_that_is_deleted_is_released_too_and_keeps_the_finalizers_of_others(
    server: Server, client: Client
) -> None:
    cache, theirs, bodies = Cache(), ["example.com/theirs"], []

    async def patched(request: web.Request) -> web.Response:
        bodies.append(json.loads(await request.text()))
        return ok(pod(**GOING, resourceVersion="10", finalizers=theirs))

    found = pod(**GOING, finalizers=[FINALIZER, *theirs])
    server.answers = [ok(found), status(422, "Invalid", "the test of a patch fails"), ok(found), patched]
    assert await Applier(client, cache).carry_out(JOB, [DeletePod("digits-0-1", "pod-1", 2)]) is None
    assert [request.method for request in server.asked] == ["DELETE", "PATCH", "GET", "PATCH"]
    assert server.asked[1].content_type == "application/json-patch+json"
    ((uid, known, rest),) = bodies
    assert (uid["op"], uid["value"]) == ("test", "pod-1")
    assert (known["op"], known["value"]) == ("test", [FINALIZER, *theirs])
    assert (rest["op"], rest["path"], rest["value"]) == ("replace", "/metadata/finalizers", theirs)
    assert [seen.held for seen in cache.observed(Owner("ns", "job-1")).pods] == [False]


async def test_a_pod_that_was_released_before_is_left_alone(server: Server, client: Client) -> None:
    cache = Cache()
    cache.put_pod(pod(resourceVersion="8", finalizers=[FINALIZER]))
    server.answers = [status(422, "Invalid"), ok(pod(resourceVersion="9"))]
    assert await Applier(client, cache).carry_out(JOB, [ReleasePod("digits-0-1", "pod-1")]) is None
    assert [request.method for request in server.asked] == ["PATCH", "GET"]
    assert [seen.held for seen in cache.observed(Owner("ns", "job-1")).pods] == [False]


async def test_a_release_that_a_policy_denies_is_told_to_the_author_of_the_job(server: Server, client: Client) -> None:
    server.answers = [status(422, "Invalid", "denied by a policy"), ok(pod(finalizers=[FINALIZER]))]
    server.answers += [status(500, "InternalError", "asked too often")]
    refused = await Applier(client, Cache()).carry_out(JOB, [ReleasePod("digits-0-1", "pod-1")])
    assert refused is not None
    assert "denied by a policy" in refused.problem.message


async def test_a_pod_without_the_finalizer_is_deleted_with_one_call(server: Server, client: Client) -> None:
    server.answers = [ok(pod(**GOING))]
    assert await Applier(client, Cache()).carry_out(JOB, [DeletePod("digits-0-1", "pod-1", 2)]) is None
    assert [request.method for request in server.asked] == ["DELETE"]


async def test_a_pod_whose_end_is_still_to_be_put_on_record_keeps_the_finalizer(server: Server, client: Client) -> None:
    cache = Cache()
    server.answers = [ok(pod(**GOING, finalizers=[FINALIZER]))]
    assert await Applier(client, cache).carry_out(JOB, [DeletePod("digits-0-1", "pod-1", None, release=False)]) is None
    assert [request.method for request in server.asked] == ["DELETE"]
    assert [(seen.deleting, seen.held) for seen in cache.observed(Owner("ns", "job-1")).pods] == [(True, True)]


async def test_a_pod_that_only_its_finalizer_kept_is_gone_with_it(server: Server, client: Client) -> None:
    cache = Cache()
    cache.put_pod(pod(resourceVersion="8", finalizers=[FINALIZER]))
    server.answers = [ok(pod(**GOING | {"deletionGracePeriodSeconds": 0}))]
    assert await Applier(client, cache).carry_out(JOB, [ReleasePod("digits-0-1", "pod-1")]) is None
    assert cache.observed(Owner("ns", "job-1")).pods == ()


@pytest.mark.parametrize(
    "answers",
    [[status(404, "NotFound")], [status(409, "Conflict"), ok(pod(uid="pod-2"))]],
    ids=["gone", "replaced"],
)
async def test_a_pod_that_is_gone_needs_no_release(server: Server, client: Client, answers: list[Answer]) -> None:
    cache = Cache()
    cache.put_pod(pod(resourceVersion="8", finalizers=[FINALIZER]))
    server.answers = answers
    assert await Applier(client, cache).carry_out(JOB, [ReleasePod("digits-0-1", "pod-1")]) is None
    assert "pod-1" not in {seen.uid for seen in cache.observed(Owner("ns", "job-1")).pods}


def creations(count: int) -> list[Action]:
    return [
        CreatePod(f"digits-0-{rank}", 0, rank, {"kind": "Pod", "metadata": {"name": f"digits-0-{rank}"}})
        for rank in range(count)
    ]


async def test_what_is_refused_is_not_asked_a_thousand_times(server: Server, client: Client) -> None:
    server.answers = [QUOTA]
    refused = await Applier(client, Cache()).carry_out(JOB, creations(1024))
    assert refused is not None
    assert (refused.problem.reason, len(server.asked)) == ("QuotaExceeded", 8)


async def test_a_webhook_that_fails_now_and_then_does_not_stop_the_gang(server: Server, client: Client) -> None:
    hiccup = status(500, "InternalError", 'failed calling webhook "a": context deadline exceeded')
    server.answers = [hiccup, ok(pod(uid="pod-2"))]
    refused = await Applier(client, Cache()).carry_out(JOB, creations(64))
    assert refused is not None
    assert (refused.problem.reason, len(server.asked)) == ("AdmissionFailed", 64)


@pytest.mark.parametrize(
    "action",
    [CreateService({"kind": "Service", "metadata": {"name": "digits-rdzv"}}), PointService("digits-rdzv", 1, {})],
    ids=["looked for", "changed"],
)
async def test_a_service_that_somebody_has_edited_to_have_no_address_is_named_with_the_fix(
    server: Server, client: Client, action: Action
) -> None:
    metadata = pod(name="digits-rdzv", uid="service-1")["metadata"]
    spec = {"type": "ExternalName", "externalName": "example.com"}
    server.answers = [ok({"metadata": metadata, "spec": spec})]
    if isinstance(action, CreateService):
        server.answers.insert(0, status(409, "AlreadyExists"))
    refused = await Applier(client, Cache()).carry_out(JOB, [action])
    assert refused is not None
    assert refused.problem.message == (
        "Service digits-rdzv was edited: its type is ExternalName, which has no spec.clusterIP or spec.ports; "
        "delete it, and the operator creates it again"
    )


async def test_no_pod_is_created_with_an_address_that_its_service_has_no_longer(server: Server, client: Client) -> None:
    cache, metadata = Cache(), pod(name="digits-rdzv", uid="service-1")["metadata"]
    spec = {"clusterIP": "10.0.0.9", "ports": [{"port": 29400}]}
    cache.put_service(Owner("ns", "job-1"), {"metadata": metadata, "spec": spec})
    server.answers = [ok({"metadata": metadata, "spec": {"type": "ExternalName", "externalName": "example.com"}})]
    assert await Applier(client, cache).carry_out(JOB, [PointService("digits-rdzv", 1, {}), *creations(1)]) is not None
    assert [request.method for request in server.asked] == ["PATCH"]


def conflict() -> web.Response:
    return status(409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "all"')


async def test_a_quota_that_conflicts_is_asked_again(server: Server, client: Client) -> None:
    cache = Cache()
    server.answers = [conflict(), conflict(), ok(pod(resourceVersion="8"))]
    assert await Applier(client, cache).carry_out(JOB, creations(1)) is None
    assert len(cache.observed(Owner("ns", "job-1")).pods) == 1


async def test_a_webhook_that_denies_with_a_conflict_is_asked_once(server: Server, client: Client) -> None:
    server.answers = [status(409, "Conflict", 'admission webhook "a" denied the request: not on Fridays')]
    refused = await Applier(client, Cache()).carry_out(JOB, creations(1))
    assert refused is not None
    assert (refused.problem.reason, len(server.asked)) == ("AdmissionDenied", 1)


async def test_a_quota_that_conflicts_for_one_pod_does_not_stop_the_gang(server: Server, client: Client) -> None:
    async def create(request: web.Request) -> web.Response:
        name = (await request.json())["metadata"]["name"]
        return conflict() if name == "digits-0-3" else ok(pod(uid=name, name=name))

    server.answers = [create]
    with pytest.raises(ApiError, match="resourcequotas"):
        await Applier(client, Cache()).carry_out(JOB, creations(64))
    assert len(server.asked) == 63 + 3


async def test_a_webhook_that_is_down_is_asked_for_one_batch(server: Server, client: Client) -> None:
    server.answers = [status(500, "InternalError", 'failed calling webhook "a": no endpoints')]
    assert await Applier(client, Cache()).carry_out(JOB, creations(64)) is not None
    assert len(server.asked) == 8


ENDED = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": 1}}}]}


async def test_a_pod_that_has_just_ended_is_kept_for_its_log(server: Server, client: Client) -> None:
    cache, bodies = Cache(), []
    cache.put_pod(pod(resourceVersion="8"))

    async def changed(request: web.Request) -> web.Response:
        bodies.append(json.loads(await request.text())["preconditions"])
        return status(409, "Conflict", "the ResourceVersion in the precondition (8) does not match")

    server.answers = [changed, ok(pod(resourceVersion="9") | {"status": ENDED})]
    assert (
        await Applier(client, cache).carry_out(JOB, [DeletePod("digits-0-1", "pod-1", 2, unless_changed=True)]) is None
    )
    assert bodies == [{"uid": "pod-1", "resourceVersion": "8"}]
    assert [seen.ended for seen in cache.observed(Owner("ns", "job-1")).pods] == [True]


async def test_a_creation_of_many_pods_is_heard_of_as_they_come(server: Server, client: Client) -> None:
    server.answers = [status(500, "InternalError", "no")]
    heard: list[str] = []
    creations = [CreatePod(f"digits-0-{rank}", 0, rank, WANTED) for rank in range(3)]
    with pytest.raises(ApiError):
        await Applier(client, Cache(), goes_on=lambda job: heard.append(job.name)).carry_out(JOB, creations)
    assert heard == ["digits"] * 3


async def test_a_release_of_many_pods_is_heard_of_as_they_go(server: Server, client: Client) -> None:
    server.answers, heard = [status(404, "NotFound")], list[Key]()
    pods = [ReleasePod(f"digits-0-{rank}", f"pod-{rank}") for rank in range(3)]
    applier = Applier(client, Cache(), goes_on=heard.append)
    assert await applier.release_all(Key("ns", "digits"), pods) == []
    assert heard == [Key("ns", "digits")] * 3
