"""How the operator's parts are put together, where a wrong connection would show on a busy cluster only."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpjob_operator import logs, main
from ddpjob_operator import settings as configuration
from ddpjob_operator.cluster.owners import Key
from ddpjob_operator.core.values.job import Defaults
from ddpjob_operator.main import WatchEnded, _assemble, _certificate
from ddpjob_operator.settings import BadSetting, Settings


@pytest.mark.usefixtures("client")
async def test_a_namespace_of_many_jobs_does_not_make_that_of_one_wait() -> None:
    looked_at: list[str] = []
    done = asyncio.Event()

    async def look(key: Key) -> None:
        looked_at.append(key.namespace)
        if len(looked_at) == 21:
            done.set()

    async with AsyncExitStack() as cleanup:
        operator = await _assemble(Settings(workers=1, leader_election=False), lambda _: Defaults(), cleanup)
        operator.queue.add_all(Key("many", f"job-{number}") for number in range(20))
        operator.queue.add(Key("one", "job"))
        operator.queue.start(look)
        await done.wait()
        await operator.queue.stop(0)
    assert looked_at.index("one") <= 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(None, 0, id="a graceful stop"),
        pytest.param(WatchEnded("pods"), 1, id="a watch has ended"),
        pytest.param(BadSetting("no certificate"), 64, id="a setting that shows late to be wrong"),
    ],
)
def test_an_end_that_takes_too_long_has_the_exit_code_of_any_other(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, code: int
) -> None:
    forced: list[tuple[int, ...]] = []

    class Timer:
        daemon = False

        def __init__(self, seconds: float, end: Callable[[int], None], arguments: tuple[int, ...]) -> None:
            forced.append(arguments)

        def start(self) -> None:
            """Nothing: its time is never up."""

    async def run(settings: Settings, defaults: Callable[[str], Defaults]) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(sys, "argv", ["ddpjob-operator"])
    monkeypatch.setattr(configuration, "load", Settings)
    monkeypatch.setattr(logs, "configure", lambda level, style: None)
    monkeypatch.setattr(main, "keep_collections_short", lambda: None)
    monkeypatch.setattr(main, "load_defaults", lambda settings: lambda namespace: Defaults())
    monkeypatch.setattr(main, "run", run)
    monkeypatch.setattr(main, "threading", SimpleNamespace(Timer=Timer))
    assert main.main() == code
    assert forced == [(code,)]


async def test_a_folder_without_a_certificate_is_refused_with_the_name_of_the_setting(tmp_path: Path) -> None:
    settings = Settings(metrics_certificate=str(tmp_path / "tls"))
    async with AsyncExitStack() as cleanup:
        with pytest.raises(BadSetting, match=r"DDPJOB_OPERATOR_METRICS_CERTIFICATE is '.*/tls', but must be a folder"):
            _certificate(settings, cleanup)
