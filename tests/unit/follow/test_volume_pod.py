"""A short-lived pod beside a job: it is waited for, and deleted whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from tests.support.waiting import PATIENCE_SECONDS

from ddpjob_operator.follow import volume_pod
from ddpjob_operator.runtime.errors import ApiError

MANIFEST = {"metadata": {"generateName": "digits-snapshots-"}, "spec": {"containers": [{"name": "snapshots"}]}}


class Pods:
    """Answers as the API server does: a pod that waits, runs and ends."""

    def __init__(self, *statuses: dict[str, Any], log: tuple[str, ...] = ()) -> None:
        self.statuses, self.log, self.deleted = list(statuses), log, 0

    async def create(self, path: str, resource: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": {"name": "digits-snapshots-x"}}

    async def get(self, path: str, resource: str) -> dict[str, Any]:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return {"metadata": {"name": "digits-snapshots-x", "uid": "x"}, "status": status}

    async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
        """The connection breaks after every line that is new."""
        assert query["container"] == "snapshots"
        for number, line in enumerate(self.log):
            stamp = f"2030-01-01T12:00:0{number}Z"
            if stamp >= query.get("sinceTime", ""):
                yield f"{stamp} {line}"
            if stamp > query.get("sinceTime", ""):
                raise ApiError(0, "ConnectionFailed", "it broke")

    async def delete(self, path: str, resource: str, body: dict[str, Any]) -> dict[str, Any]:
        self.deleted += 1
        return {}


def waiting(reason: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": "no such image"}}
    return {"phase": "Pending", "containerStatuses": [{"name": "snapshots", "state": state}]}


def ended(code: int) -> dict[str, Any]:
    return {
        "phase": "Failed",
        "containerStatuses": [{"name": "snapshots", "state": {"terminated": {"exitCode": code}}}],
    }


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_pod, "SECONDS_BETWEEN_LOOKS", 0.0)


async def run(pods: Pods, say: list[str] | None = None, note: list[str] | None = None) -> int:
    """The exit code of the pod; the lines that it prints and the notes about it are appended."""
    said, notes = [] if say is None else say, [] if note is None else note
    return await volume_pod.run_pod(cast(Any, pods), "default", MANIFEST, said.append, notes.append)


async def test_the_pods_log_and_exit_code_are_those_of_the_command() -> None:
    pods = Pods(
        waiting("ErrImagePull"), {"phase": "Running"}, ended(1), log=("step 20: ok", "step 10: BAD,  \x1b[2Jgone")
    )
    said, notes = list[str](), list[str]()
    assert await run(pods, said, notes) == 1
    assert said == ["step 20: ok", "step 10: BAD,  [2Jgone"]
    assert notes == ["waiting for pod digits-snapshots-x: ErrImagePull: no such image"]
    assert pods.deleted == 1


async def test_lines_with_one_time_stamp_are_all_said() -> None:
    """CRI-O gives the same stamp to all lines that it has read at once: of 8 KiB one line was left."""

    class OfCriO(Pods):
        async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
            for line in self.log:
                yield f"2030-01-01T12:00:00Z {line}"

    said = list[str]()
    pods = OfCriO({"phase": "Running"}, ended(0), log=("step 20: ok", "step 10: ok"))
    assert await run(pods, said) == 0
    assert said == ["step 20: ok", "step 10: ok"]


async def test_a_log_that_ends_although_its_container_runs_is_read_on_from_its_last_line() -> None:
    """Where a kubelet is restarted: what came after that was left out, with exit code 0."""
    asked = list[str]()

    class Restarted(Pods):
        async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
            asked.append(query.get("sinceTime", ""))
            if len(asked) == 2:
                raise ApiError(502, "BadGateway", "dial tcp 10.0.0.2:10250: connect: connection refused")
            yield "2030-01-01T12:00:00Z step 20: ok"
            if len(asked) == 1:
                yield "2030-01-01T12:00:0"
            else:
                yield "2030-01-01T12:00:01Z step 10: ok"

    said, pods = list[str](), Restarted(*[{"phase": "Running"}] * 3, ended(0))
    assert await run(pods, said) == 0
    assert said == ["step 20: ok", "step 10: ok"]
    assert asked == ["", "2030-01-01T12:00:00Z", "2030-01-01T12:00:00Z"]


async def test_a_kubelet_that_does_not_answer_is_an_error_once_the_container_has_ended() -> None:
    class Away(Pods):
        asked = 0

        async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
            self.asked += 1
            if self.asked > 1:
                raise ApiError(502, "BadGateway", "dial tcp 10.0.0.2:10250: connect: connection refused")
            yield "2030-01-01T12:00:00Z step 20: ok"

    with pytest.raises(ApiError, match="connection refused"):
        await run(Away(*[{"phase": "Running"}] * 3, ended(0)))


async def test_the_kubelet_of_a_lost_node_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server says that its pod runs, until the pod is deleted."""
    monkeypatch.setattr(volume_pod, "SECONDS_WITHOUT_ANSWER", 0.0)
    asked = list[str]()

    class Lost(Pods):
        async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
            asked.append(path)
            if len(asked) in (2, 4, 5):
                raise ApiError(502, "BadGateway", "dial tcp 10.0.0.2:10250: i/o timeout")
            yield "2030-01-01T12:00:00Z step 20: ok"

    said = list[str]()
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(ApiError, match="i/o timeout"):
            await run(Lost({"phase": "Running"}), said)
    assert said == ["step 20: ok"]
    assert len(asked) == 5, "what answers in between begins the time anew"


async def test_what_a_kubelet_says_in_the_place_of_a_log_is_said() -> None:
    """`snapshots verify` would print nothing, and end with exit code 0."""

    class Forgotten(Pods):
        async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
            yield "unable to retrieve container logs for containerd://5f"

    said = list[str]()
    assert await run(Forgotten({"phase": "Running"}, ended(0)), said) == 0
    assert said == ["unable to retrieve container logs for containerd://5f"]


async def test_a_container_that_a_webhook_has_injected_is_not_the_command() -> None:
    """An API server wants to know which one where there are several; the kubelet sorts them by name."""
    proxy = {"name": "istio-proxy", "state": {"terminated": {"exitCode": 137}}}
    over = ended(3) | {"phase": "Running"}
    over["containerStatuses"].insert(0, proxy)
    assert await run(Pods({"phase": "Running", "containerStatuses": [proxy]}, over, log=("step 20: ok",))) == 3


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ([waiting("ErrImagePull")], "has not started within 0 s: ErrImagePull"),
        ([{"phase": "Running"}, {"phase": "Failed", "reason": "DeadlineExceeded"}], "was stopped: DeadlineExceeded"),
    ],
)
async def test_a_pod_that_comes_to_nothing_is_explained_and_deleted(
    statuses: list[dict[str, Any]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_pod, "SECONDS_TO_START", 0.0)
    pods = Pods(*statuses)
    with pytest.raises(ApiError, match=words):
        await run(pods)
    assert pods.deleted == 1


async def test_a_pod_whose_creation_is_not_answered_any_more_is_deleted() -> None:
    """Ctrl-C may come when the API server has made it and the answer is on its way."""

    class Interrupted(Pods):
        async def create(self, path: str, resource: str, body: dict[str, Any]) -> dict[str, Any]:
            raise asyncio.CancelledError

    pods = Interrupted({})
    with pytest.raises(asyncio.CancelledError):
        await run(pods)
    assert pods.deleted == 1
