"""What changes in the files of a login while the operator runs."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from tests.unit.answers import Server

from ddpjob_operator.runtime.client import Client, connect
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import log_in, open_session


def certified(folder: Path) -> Path:
    """A folder with a new certificate for 127.0.0.1, which is its own authority."""
    folder.mkdir()
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "1", "-subj", f"/CN={folder.name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", folder / "tls.key", "-out", folder / "tls.crt"]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    return folder


@asynccontextmanager
async def serving(certificate: Path) -> AsyncIterator[str]:
    """The URL of a server with this certificate."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"path": request.path})

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate / "tls.crt", certificate / "tls.key")
    app = web.Application()
    app.router.add_get("/version", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.processes
async def test_an_authority_that_is_new_in_the_file_is_trusted_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rotation puts both into each pod, and then gives the API servers certificates of the new one."""
    old, new = (certified(tmp_path / name) for name in ("old", "new"))
    authorities = tmp_path / "ca.crt"
    authorities.write_bytes((old / "tls.crt").read_bytes())
    async with serving(new) as url:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority": str(authorities)}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        client = await connect()
        try:
            with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get("/version", "version")
            both = b"".join((folder / "tls.crt").read_bytes() for folder in (old, new))
            for written in (both[:-40], both):
                authorities.write_bytes(written)
                with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):  # what makes it read the file again
                    await client.get("/version", "version")
            assert await client.get("/version", "version") == {"path": "/version"}
        finally:
            await client.close()


async def test_the_kernel_notices_that_a_silent_connection_is_lost(server: Server, client: Client) -> None:
    """A log that was followed over one that was lost without a word was waited for until Ctrl-C."""
    seen = asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await seen.wait()
        return response

    server.answers = [silent]
    async with open_session(await log_in()) as session, session.get(server.url) as answer:
        assert answer.connection is not None
        assert answer.connection.transport is not None
        used = answer.connection.transport.get_extra_info("socket")
        assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        names = ("TCP_KEEPIDLE", "TCP_KEEPALIVE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        options = [option for name in names if (option := getattr(socket, name, None)) is not None]
        assert [used.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [30, 10, 3]
        seen.set()
