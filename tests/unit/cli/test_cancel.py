"""`ddpjob cancel --wait` while the API server is away, and what is answered to the question."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from tests.unit.answers import Server, ok, status

from ddpjob_operator.cli import cancel
from ddpjob_operator.cli.on_cluster import Cluster
from ddpjob_operator.follow import outage
from ddpjob_operator.runtime.client import Client

JOB: dict[str, Any] = {"metadata": {"name": "digits", "uid": "u"}}
OWNER = {"kind": "DDPJob", "uid": "u", "controller": True}


def pods(*names: str) -> web.Response:
    items = [{"metadata": {"name": name, "ownerReferences": [OWNER]}} for name in names]
    return ok({"metadata": {"resourceVersion": "7"}, "items": items})


async def test_pods_that_save_are_waited_for_over_an_outage(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cancel, "SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(outage, "SECONDS_BETWEEN_TRIES", 0.0)
    away = status(503, "ServiceUnavailable", "the server is starting")
    server.answers = [pods("digits-0-0"), away, away, pods("digits-0-0"), pods()]
    await cancel._wait_for_pods(client, "ml", JOB)
    said = capsys.readouterr()
    assert said.out == "no pod of digits is left\n"
    assert said.err.splitlines() == ["waiting for 1 pod to end", "ddpjob: the server is starting; trying again"]


@pytest.mark.parametrize(("answer", "code"), [(KeyboardInterrupt, 130), (EOFError, 1)])
def test_a_question_that_is_not_answered_leaves_the_job_alone(
    answer: type[BaseException], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C has the exit code that it has everywhere else."""

    async def read(*_: Any) -> dict[str, Any]:
        return JOB

    def leave(_: str) -> str:
        raise answer

    monkeypatch.setattr(cancel, "read_job", read)
    monkeypatch.setattr(cancel, "asked", lambda _, ask, **__: asyncio.run(ask(None, "ml")))
    monkeypatch.setattr(cancel, "is_terminal", lambda *_: True)
    monkeypatch.setattr("builtins.input", leave)
    assert cancel.cancel(Cluster(), "digits", keep=False, unasked=False, wait=False) == code
    assert capsys.readouterr().out == "digits: it has no pod that trains.\n\ndigits goes on\n"
