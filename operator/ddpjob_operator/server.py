"""The operator's own HTTP ports: /metrics for Prometheus on one, /healthz and /readyz for the kubelet on another.

Probes answer from what the process knows of itself. An API server that is away makes the operator unready, not
unhealthy: a restart would mend nothing and lose the picture of the cluster. They have a port of their own because a
kubelet has no credentials, and metrics may require them, and TLS.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from ddpjob_operator import metrics

Probe = Callable[[], list[str]]
"""Returns what is wrong, in words; an empty list is good."""

Authorize = Callable[[str], Awaitable[int]]
"""Returns the HTTP status for an Authorization header; 200 lets the request in."""

Handler = Callable[[web.Request], Awaitable[web.Response]]


async def serve_metrics(
    port: int, authorize: Authorize | None = None, tls: ssl.SSLContext | None = None
) -> tuple[web.AppRunner, int]:
    """Serve /metrics on all interfaces, to all or to those whom `authorize` lets in; port 0 takes a free one. Without
    `tls` it is plain HTTP.

    Returns:
        the runner, to be cleaned up at the end, and the port.

    Raises:
        OSError: the port is taken.
    """

    async def page(request: web.Request) -> web.Response:
        if authorize is not None:
            status = await authorize(request.headers.get("Authorization", ""))
            if status != web.HTTPOk.status_code:
                headers = {"WWW-Authenticate": "Bearer"} if status == web.HTTPUnauthorized.status_code else None
                return web.Response(status=status, headers=headers)
        body, content_type = await metrics.page(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    return await _serve(port, {"/metrics": page}, tls)


async def serve_probes(port: int, *, healthy: Probe, ready: Probe) -> tuple[web.AppRunner, int]:
    """The same for /healthz and /readyz."""
    return await _serve(port, {"/healthz": _probe(healthy), "/readyz": _probe(ready)})


async def _serve(
    port: int, handlers: Mapping[str, Handler], tls: ssl.SSLContext | None = None
) -> tuple[web.AppRunner, int]:
    app = web.Application()
    for path, handler in handlers.items():
        app.router.add_get(path, handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, None, port, ssl_context=tls)
    await site.start()
    return runner, runner.addresses[0][1]


def _probe(probe: Probe) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        wrong = probe()
        return web.Response(text="\n".join(wrong) or "ok", status=503 if wrong else 200)

    return answer
