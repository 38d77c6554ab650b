"""The logs of a job whose pods are gone: when the volume is read, in which pod, and what is said meanwhile."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.follow import volume_pod
from ddpjob_operator.follow.lines import Line, Wanted
from ddpjob_operator.follow.volume_logs import VolumeLogs, may_be_on_volume_alone
from ddpjob_operator.follow.volume_snapshots import pod_on_volume
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import parse_status

JOB: dict[str, Any] = {
    "metadata": {"name": "digits", "namespace": "ml", "uid": "u", "creationTimestamp": "2030-01-01T12:00:00Z"},
    "spec": {"procsPerNode": 2},
    "status": {"phase": "Succeeded", "attempt": 2},
}


def claim(image: str | None = "trainer:1") -> dict[str, Any]:
    annotations = {} if image is None else {"training.ddpjob.io/trainer-image": image}
    return {"metadata": {"name": "digits-shared", "namespace": "ml", "uid": "c", "annotations": annotations}}


class Api:
    """An API server with a claim, whose pod prints `log` and ends with `code`."""

    def __init__(
        self,
        found: dict[str, Any] | ApiError,
        log: tuple[str, ...] = (),
        code: int = 0,
        refusal: ApiError | None = None,
    ) -> None:
        self.claim, self.log, self.code, self.refusal = found, log, code, refusal
        self.made: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.deleted = 0

    async def get(self, path: str, resource: str) -> dict[str, Any]:
        if resource == "persistentvolumeclaims":
            if isinstance(self.claim, ApiError):
                raise self.claim
            return self.claim
        ended = {"name": "logs", "state": {"terminated": {"exitCode": self.code}}}
        return {"metadata": {"name": "x", "uid": "x"}, "status": {"phase": "Failed", "containerStatuses": [ended]}}

    async def create(self, path: str, resource: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        self.made.append(body)
        return body

    async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
        for number, line in enumerate(self.log):
            yield f"2030-01-01T12:00:0{number}Z {line}"

    async def delete(self, path: str, resource: str, body: dict[str, Any]) -> dict[str, Any]:
        self.deleted += 1
        return {}


def logs(api: Api, wanted: Wanted | None = None, image: str | None = None) -> VolumeLogs:
    return VolumeLogs(cast(Any, api), "ml", wanted or Wanted(), image, api.notes.append)


async def of_job(api: Api, wanted: Wanted | None = None, image: str | None = None) -> list[Line]:
    return [line async for line in logs(api, wanted, image).of_job(JOB, [])]


def arguments(api: Api) -> list[str]:
    (pod,) = api.made
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python", "-m", "ddp_trainer.logs.pods"]
    return container["args"]


NOT_FOUND = ApiError(404, "NotFound", "persistentvolumeclaims not found")
FORBIDDEN = ApiError(403, "Forbidden", "cannot get resource")


@pytest.mark.parametrize(
    ("status", "wanted", "there"),
    [
        ({"phase": "Succeeded"}, Wanted(), True),
        ({"phase": "Failed"}, Wanted(), True),
        ({"phase": "Suspended"}, Wanted(), True),
        ({"phase": "Running", "attempt": 3}, Wanted(attempt=2), True),
        ({"phase": "Running", "attempt": 3}, Wanted(attempt=3), False),
        ({"phase": "Running", "attempt": 3}, Wanted(), False),
        ({}, Wanted(), False),
    ],
)
def test_the_volume_is_asked_for_pods_that_have_been_there(status: dict[str, Any], wanted: Wanted, there: bool) -> None:
    found: DDPJobStatus = parse_status(status)
    assert may_be_on_volume_alone(found, wanted) is there


async def test_lines_are_those_of_the_ranks_and_the_rest_are_notes() -> None:
    api = Api(claim(), ("[rank 3] loss 0.5", "a warning of Python"))
    assert await of_job(api) == [Line("", 1, 3, "loss 0.5")]
    assert api.notes == [
        "a short-lived pod reads the logs from the volume, claim digits-shared; Ctrl-C deletes it",
        "a warning of Python",
    ]
    assert api.deleted == 1


async def test_no_line_and_no_log_are_told_apart() -> None:
    api = Api(claim())
    assert await of_job(api) == []
    assert api.notes[-1] == "no line on the volume matches"
    with pytest.raises(ApiError, match=r"^NoLogs: the volume has no logs of pods of digits$"):
        await of_job(Api(claim(), ("error: the volume has no logs of pods of digits",), code=2))
    with pytest.raises(ApiError, match="the pod that reads the volume ended with exit code 137"):
        await of_job(Api(claim(), code=137))


async def test_who_stops_reading_has_the_pod_deleted() -> None:
    api = Api(claim(), ("[rank 0] one", "[rank 0] two"))
    lines = logs(api).of_job(JOB, [])
    assert (await anext(lines)).text == "one"
    assert api.deleted == 0
    await lines.aclose()
    assert api.deleted == 1


async def test_lines_are_chosen_in_the_pod() -> None:
    api = Api(claim())
    await of_job(api, Wanted(rank=3, pattern=re.compile("-loss$"), tail=5, since_seconds=60))
    chosen = ["--attempt=2", "--rank=3", "--grep=-loss$$", "--tail=5", "--since=60"]
    assert arguments(api) == ["/mnt/shared", "digits", *chosen]


async def test_of_a_job_that_is_gone_the_newest_attempt_on_its_claim_is_read() -> None:
    api = Api(claim())
    assert [line async for line in logs(api).of_claim("digits", None)] == []
    assert arguments(api) == ["/mnt/shared", "digits"]
    assert api.made[0]["spec"]["containers"][0]["image"] == "trainer:1"


async def test_a_claim_that_is_gone_is_said_before_a_pod_waits_for_it() -> None:
    api = Api(NOT_FOUND)
    with pytest.raises(ApiError, match="there is no claim digits-shared in namespace ml: the volume is gone"):
        await of_job(api, image="mine:1")
    assert api.made == []


async def test_who_may_not_see_the_claim_needs_to_name_the_image() -> None:
    with pytest.raises(ApiError, match="cannot get resource"):
        await of_job(Api(FORBIDDEN))
    api = Api(FORBIDDEN)
    assert await of_job(api, image="mine:1") == []
    assert api.made[0]["spec"]["containers"][0]["image"] == "mine:1"


REFUSED = JOB | {
    "status": {
        "phase": "Failed",
        "lastFailure": {
            "attempt": 0,
            "time": "2030-01-01T12:00:00Z",
            "reason": "BeyondBounds",
            "message": "spec.podTemplate.spec.serviceAccountName: 'admin'\x1b[2J",
        },
    }
}


class Asked:
    """An API server with a job that has no pods."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job

    async def get(self, path: str, resource: str) -> dict[str, Any]:
        return self.job

    async def list(self, path: str, resource: str, **query: str) -> Any:
        return [], 1


@pytest.mark.parametrize("reason", ["BeyondBounds", "InvalidSpec"])
async def test_no_pod_is_made_from_a_job_that_was_refused(reason: str) -> None:
    """It would have the account and the image that a bound forbids, with the rights of the person who asks."""
    failure = REFUSED["status"]["lastFailure"] | {"reason": reason}
    refused, api = REFUSED | {"status": {"phase": "Failed", "lastFailure": failure}}, Api(claim())
    with pytest.raises(ApiError, match=r"no pod is started from it: spec\.podTemplate\.spec\.service") as read:
        await anext(logs(api).of_job(refused, []))
    assert api.made == []
    with pytest.raises(ApiError) as listed:
        await pod_on_volume(cast(Any, Asked(refused)), "ml", "digits", "ls", (), None)
    assert listed.value.message == read.value.message
    assert listed.value.message.isprintable()


ACCOUNT = {"podTemplate": {"spec": {"serviceAccountName": "admin", "automountServiceAccountToken": True}}}
OTHERS = {"shared": {"claimName": "others"}}


@pytest.mark.parametrize("spec", [ACCOUNT, OTHERS], ids=["an account", "a claim"])
@pytest.mark.parametrize(
    ("status", "checked"),
    [
        ({}, False),
        ({"phase": "Suspended"}, False),
        ({"phase": "Suspended", "attempt": 1}, True),
        ({"phase": "Suspended", "internal": {"specDigests": {"image": "74234e98afe7"}}}, True),
        ({"phase": "Pending"}, True),
        ({"phase": "Failed"}, True),
    ],
)
async def test_no_pod_is_made_from_what_the_operator_has_not_checked(
    status: dict[str, Any], checked: bool, spec: dict[str, Any]
) -> None:
    """The operator checks the bounds when a job begins: one that was suspended before is not refused."""
    job = JOB | {"spec": spec | {"image": "trainer:1"}, "status": status}
    asked = cast(Any, Asked(job))
    if checked:
        made, _ = await pod_on_volume(asked, "ml", "digits", "ls", (), None)
        assert made["kind"] == "Pod"
        return
    with pytest.raises(ApiError, match=r"does not check digits's podTemplate .*no pod is started from it"):
        await pod_on_volume(asked, "ml", "digits", "ls", (), None)
    api = Api(claim())
    with pytest.raises(ApiError, match="no pod is started from it"):
        await anext(logs(api).of_job(job, []))
    assert api.made == []


async def test_a_job_that_has_not_begun_and_names_neither_has_its_volume_read() -> None:
    job = JOB | {"spec": {"image": "trainer:1"}, "status": {"phase": "Suspended"}}
    made, _ = await pod_on_volume(cast(Any, Asked(job)), "ml", "digits", "ls", (), None)
    assert made["kind"] == "Pod"


async def test_without_an_image_the_option_is_named() -> None:
    with pytest.raises(ApiError, match=r"neither digits nor the claim digits-shared says .* --image"):
        await of_job(Api(claim(None)))


async def test_a_pod_that_may_not_be_made_is_not_deleted() -> None:
    api = Api(claim(), refusal=ApiError(403, "Forbidden", "cannot create resource pods"))
    with pytest.raises(ApiError, match="cannot create resource pods"):
        await of_job(api)
    assert api.deleted == 0
    assert not any("is deleted" in note for note in api.notes)


async def test_who_stops_it_reads_that_the_pod_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(Api):
        async def get(self, path: str, resource: str) -> dict[str, Any]:
            if resource == "pods":
                raise asyncio.CancelledError
            return await super().get(path, resource)

    monkeypatch.setattr(volume_pod.secrets, "token_hex", lambda _: "00")
    api = Waits(claim())
    with pytest.raises(asyncio.CancelledError):
        await of_job(api)
    assert api.deleted == 1
    assert api.notes[-1] == "stopped; pod digits-logs-00 is deleted"


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        ({}, "and try again$"),
        ({"podTemplate": {"spec": {"nodeSelector": {"pool": "gpu"}}}}, "ddpjob logs digits --claim digits-shared$"),
        (
            {
                "podTemplate": {"spec": {"nodeSelector": {"pool": "gpu"}}},
                "shared": {"claimName": "team", "scope": "Job"},
            },
            "and try again$",
        ),
    ],
)
async def test_where_the_nodes_of_the_job_are_full_another_way_to_its_logs_is_named(
    spec: dict[str, Any], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod that reads the volume goes to these nodes, of which a cluster may have none but for jobs."""

    class Waits(Api):
        async def get(self, path: str, resource: str) -> dict[str, Any]:
            if resource == "pods":
                return {"metadata": {"name": "x", "uid": "x"}, "status": {"phase": "Pending"}}
            return await super().get(path, resource)

    monkeypatch.setattr(volume_pod, "SECONDS_TO_START", 0.0)
    api = Waits(claim())
    with pytest.raises(ApiError, match=advice):
        _ = [line async for line in logs(api).of_job(JOB | {"spec": spec}, [])]
    assert api.deleted == 1
