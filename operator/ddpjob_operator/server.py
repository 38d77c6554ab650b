"""The operator's own HTTP port: /metrics for Prometheus, /healthz and /readyz for the kubelet.

Probes answer from what the process knows of itself. An API server that is away makes the operator unready, not
unhealthy: a restart would mend nothing and lose the picture of the cluster.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from ddpjob_operator import metrics

Probe = Callable[[], list[str]]
"""Returns what is wrong, in words; an empty list is good."""


async def serve(port: int, *, healthy: Probe, ready: Probe) -> tuple[web.AppRunner, int]:
    """Serve on all interfaces; 0 takes a free port.

    Returns:
        the runner, to be cleaned up at the end, and the port.

    Raises:
        OSError: the port is taken.
    """
    app = web.Application()
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/healthz", _probe(healthy))
    app.router.add_get("/readyz", _probe(ready))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, None, port)
    await site.start()
    return runner, runner.addresses[0][1]


async def _metrics(request: web.Request) -> web.Response:
    body, content_type = await metrics.page(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


def _probe(probe: Probe) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        wrong = probe()
        return web.Response(text="\n".join(wrong) or "ok", status=503 if wrong else 200)

    return answer
