"""`ddpjob cancel --wait` while the API server is away."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from tests.unit.answers import Server, ok, status

from ddpjob_operator.cli import cancel
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
