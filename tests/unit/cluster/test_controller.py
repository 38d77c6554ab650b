"""What a replica forgets when another one acts."""

from __future__ import annotations

from ddpjob_operator.cluster.cache import Cache, Key
from ddpjob_operator.cluster.controller import Controller, _LastPass
from ddpjob_operator.cluster.status_poll import StatusPoller
from ddpjob_operator.core.values.job import Defaults, Problem
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.events import EventRecorder


async def test_a_refusal_is_forgotten_when_another_replica_leads(client: Client) -> None:
    key, poller = Key("ns", "digits"), StatusPoller()
    controller = Controller(
        client=client,
        cache=Cache(),
        recorder=EventRecorder(client, "here"),
        defaults=lambda _: Defaults(),
        progress_seconds=1.0,
        enqueue=lambda _: None,
        poller=poller,
        leader=None,
    )
    last = controller._last[key] = _LastPass("job-1", rejected=Problem("QuotaExceeded", "exceeded quota"))
    controller.stand_down()
    assert (controller._last[key], last.rejected) == (last, None)
    await poller.close()
