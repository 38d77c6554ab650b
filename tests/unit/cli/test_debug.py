"""What `ddpjob debug` refuses, and what it gives to copy."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.virtual_time import run
from typer.testing import CliRunner

from ddpjob_operator.cli import debug
from ddpjob_operator.cli.debug import _failed, _until_it_ends
from ddpjob_operator.cli.main import app
from ddpjob_operator.cli.on_cluster import Cluster
from ddpjob_operator.cli.parameters import GlobalOptions
from ddpjob_operator.core.manifests.debug_pod import Visit
from ddpjob_operator.runtime.errors import NO_CONFIGURATION, ApiError
from ddpjob_operator.wire.jobs import parse_job


@pytest.mark.parametrize("duration", ["soon", "0m"])
def test_a_time_for_which_no_shell_can_be_there_is_refused(duration: str) -> None:
    refused = CliRunner().invoke(app, ("debug", "digits", "--for", duration))
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --for: ")
    assert duration in refused.stderr


@pytest.mark.parametrize(
    ("pods", "said"),
    [
        (
            [{"metadata": {"name": "digits-0-0"}, "status": {"phase": "Running"}}],
            "kubectl --kubeconfig prod.yaml --context prod exec -it -n ml digits-0-0 -c trainer -- sh opens a shell",
        ),
        ([], "ddpjob --kubeconfig prod.yaml why digits -n ml --context prod says where it is"),
    ],
)
def test_what_is_given_to_copy_asks_the_same_cluster(
    pods: list[dict[str, Any]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GlobalOptions, "kubeconfig", "prod.yaml")
    job = parse_job({"metadata": {"name": "digits", "namespace": "ml", "uid": "u-1"}, "spec": {}})
    with pytest.raises(ApiError) as refusal:
        _failed(job, pods, Cluster(context="prod"), "default")
    assert said in refusal.value.message


class Answers:
    """An API server that gives these answers, one after the other: a phase of the pod, or an error."""

    def __init__(self, answers: Sequence[str | ApiError]) -> None:
        self.left = list(answers)

    async def get(self, path: str, resource: str) -> dict[str, Any]:
        answer = self.left.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return {"status": {"phase": answer}}


@pytest.mark.parametrize(
    "passing",
    [
        ApiError(0, "ConnectionFailed", "it broke"),
        ApiError(429, "TooManyRequests", "later"),
        ApiError(500, "InternalError", "etcdserver: leader changed"),
        ApiError(503, "ServiceUnavailable", "shutting down"),
    ],
)
def test_an_api_server_that_is_busy_or_away_for_a_while_does_not_take_the_shell_away(passing: ApiError) -> None:
    api = Answers(["Running", passing, passing, "Running", "Failed"])
    run(_until_it_ends(cast(Any, api), "pods/debug"))
    assert api.left == []


@pytest.mark.parametrize(
    "refusal",
    [
        ApiError(0, NO_CONFIGURATION, "log in again"),
        ApiError(403, "Forbidden", "no"),
        ApiError(401, "Unauthorized", ""),
    ],
)
def test_a_login_that_has_ended_and_a_refusal_are_not_waited_for(refusal: ApiError) -> None:
    with pytest.raises(ApiError) as raised:
        run(_until_it_ends(cast(Any, Answers(["Running", refusal])), "pods/debug"))
    assert raised.value is refusal


@pytest.mark.parametrize(
    ("options", "visit"),
    [
        ([], Visit(1800, "worker-3", gpus=False)),
        (["--any-node"], Visit(1800, None, gpus=False)),
        (["--gpus"], Visit(1800, "worker-3", gpus=True)),
        (["--any-node", "--gpus", "--for", "2h"], Visit(7200, None, gpus=True)),
    ],
)
def test_where_the_shell_is_and_what_it_has_is_as_the_options_say(
    options: list[str], visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = {"name": "trainer", "image": "old:1"}
    pod = {
        "metadata": {"name": "digits-0-1", "creationTimestamp": "2030-01-01T12:00:00Z"},
        "spec": {"nodeName": "worker-3", "containers": [trainer]},
        "status": {"phase": "Failed"},
    }
    asked_for: list[Visit] = []

    async def read_job(*_: Any) -> dict[str, Any]:
        return {"metadata": {"name": "digits", "namespace": "ml", "uid": "u-1"}, "spec": {}}

    async def read_pods(*_: Any) -> list[dict[str, Any]]:
        return [pod]

    def refused(job: Any, failed: Any, visit: Visit) -> Any:
        asked_for.append(visit)
        raise ApiError(403, "Forbidden", "no")

    def asked(cluster: Cluster, ask: Callable[[Any, str], Coroutine[Any, Any, int]]) -> int:
        with pytest.raises(ApiError):
            run(ask(SimpleNamespace(namespace="ml"), "ml"))
        return 2

    for name, stand_in in (
        ("asked", asked), ("read_job", read_job), ("read_pods", read_pods), ("build_debug_pod", refused)
    ):  # fmt: skip
        monkeypatch.setattr(debug, name, stand_in)
    assert CliRunner().invoke(app, ["debug", "digits", *options]).exit_code == 2
    assert asked_for == [visit]
