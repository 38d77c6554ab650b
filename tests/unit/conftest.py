"""An API server that answers what the test says, and a client that is logged in there.

Their modules are imported where they are used: with `-n`, a process that runs no test reads this file too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from tests.unit.answers import Server

    from ddpjob_operator.runtime.client import Client


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    from aiohttp import web
    from tests.unit.answers import Server

    found = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", found.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


@pytest.fixture
async def client(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """Logged in with a kubeconfig that names a token file."""
    from ddpjob_operator.runtime.client import connect

    (tmp_path / "token").write_text("first")
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"tokenFile": str(tmp_path / "token")}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    found = await connect(in_flight=2)
    yield found
    await found.close()
