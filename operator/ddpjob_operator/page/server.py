"""The pages over HTTP, for the person who started it: on 127.0.0.1 only, unless another address is given.

Every request gets; nothing is changed. A page of another site cannot read these: the Host header must be an address
or this machine (DNS rebinding), and by the Content-Security-Policy the browser loads and runs nothing from elsewhere,
nor inline.
"""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from aiohttp import web

from ddpjob_operator.page.job_view import job_view, log_lines, log_path
from ddpjob_operator.page.links import LinkTemplate, all_links
from ddpjob_operator.page.list_view import Filter, ListView, list_view, path_of
from ddpjob_operator.page.values import Detail, LogQuery, Scope, Source, SourceError
from ddpjob_operator.runtime.paths import NAME, NAMESPACE

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_HERE = Path(__file__).parent
_STATIC = {"style.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
_MOST_LINES = 5000
_MOST_ATTEMPTS = 1000
_MOST_RANKS = 1024 * 64
"""To choose from. In a folder a job may say that it has any number."""
_NUMBER = re.compile(r"[0-9]{1,9}")
_SECONDS_TO_END = 1.0
_SOURCE = web.AppKey("source", Source)
_TEMPLATES = web.AppKey("templates", jinja2.Environment)
_LINKS = web.AppKey[tuple[LinkTemplate, ...]]("links")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    source: Source, names: frozenset[str] = frozenset(), links: Sequence[LinkTemplate] = ()
) -> web.Application:
    """The pages of a source. `names` are host names that a request may be for, besides localhost and addresses; `links`
    are links of every job.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_own_host(request.headers.get("Host", ""), names):
            return web.Response(status=421, text="This server does not serve the host that the request names.\n")
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return _error(request, 404, "Not found", "There is no such page.")
        except SourceError as error:
            return _error(request, 502, "No answer", str(error))

    async def with_headers(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)
        response.headers.setdefault("Cache-Control", "no-store")

    app = web.Application(middlewares=[guard])
    app.on_response_prepare.append(with_headers)
    app[_SOURCE], app[_TEMPLATES], app[_LINKS] = source, _templates(), tuple(links)
    app.router.add_get("/", _list)
    app.router.add_get("/jobs/{namespace}/{name}", _job)
    app.router.add_get("/jobs/{namespace}/{name}/logs", _logs)
    app.router.add_get("/jobs/{namespace}/{name}/logs/stream", _stream)
    app.router.add_get("/static/{file}", _static)
    return app


async def serve(
    source: Source, address: str, port: int, links: Sequence[LinkTemplate] = (), names: frozenset[str] = frozenset()
) -> tuple[web.AppRunner, str]:
    """Serve them; port 0 takes a free one, and the address `*` is all that this machine has.

    Returns:
        the runner, to be cleaned up at the end, and the URL.

    Raises:
        OSError: the address or the port cannot be used.
    """
    own = frozenset() if _is_loopback(address) else frozenset({socket.gethostname().lower(), address.lower()})
    # a window that is closed ends what it follows, also while no line comes
    runner = web.AppRunner(
        make_app(source, own | names, links),
        access_log=None,
        shutdown_timeout=_SECONDS_TO_END,
        handler_cancellation=True,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, None if address == "*" else address, port).start()
    except OSError:
        await runner.cleanup()
        raise
    host = f"[{address}]" if ":" in address else address
    return runner, f"http://{host}:{runner.addresses[0][1]}/"


def is_own_host(header: str, names: frozenset[str]) -> bool:
    """Whether a Host header names an address or this machine. A name of another domain may have been pointed here by
    its owner, whose page the browser would then let read the answer.
    """
    host = header.lower()
    host = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.rpartition(":")[0] or host
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host in names
    return True


async def _list(request: web.Request) -> web.Response:
    query = request.query
    wanted = Filter(query.get("phase", ""), query.get("namespace", ""), query.get("name", "").strip())
    view: ListView = list_view(await request.app[_SOURCE].jobs(), wanted, datetime.now(UTC))
    return _page(request, "list.html", view=view, seconds=view.seconds)


async def _job(request: web.Request) -> web.Response:
    detail = await _detail(request)
    if detail is None:
        return _no_such_job(request)
    view, job = job_view(detail), detail.job
    templates: tuple[LinkTemplate, ...] = request.app[_LINKS]
    links = all_links(templates, job.links, job.namespace, job.name, job.uid)
    return _page(request, "job.html", view=view, detail=detail, links=links, seconds=view.seconds)


async def _logs(request: web.Request) -> web.Response:
    namespace, name, query = *_job_of(request), _log_query(request)
    detail = await _detail(request)
    lines = await request.app[_SOURCE].log(namespace, name, query)
    if detail is None or lines is None:
        return _no_such_job(request)
    return _page(
        request,
        "logs.html",
        detail=detail,
        view=job_view(detail),
        lines=log_lines(lines[-_MOST_LINES:]),
        query=query,
        stream=log_path(namespace, name, query, "/logs/stream"),
        attempts=range(max(0, detail.job.status.attempt + 1 - _MOST_ATTEMPTS), detail.job.status.attempt + 1),
        ranks=range(min((detail.job.nodes or 0) * (detail.job.ranks_per_node or 1), _MOST_RANKS)),
        seconds=0,
    )


async def _stream(request: web.Request) -> web.StreamResponse:
    """The lines as Server-Sent Events: `line` for each, and `end` when the job has ended."""
    namespace, name, query = *_job_of(request), _log_query(request)
    if await _detail(request) is None:
        return _no_such_job(request)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    async with aclosing(request.app[_SOURCE].follow(namespace, name, query)) as lines:
        # a window that was closed gets no end; nor does one whose source broke, so that it connects again
        with suppress(ConnectionResetError, SourceError):
            async for line in lines:
                (shown,) = log_lines((line,))
                await response.write(f"event: line\ndata: {json.dumps(asdict(shown))}\n\n".encode())
            await response.write(b"event: end\ndata: {}\n\n")
    return response


async def _static(request: web.Request) -> web.Response:
    name = request.match_info["file"]
    if name not in _STATIC:
        raise web.HTTPNotFound
    body = (_HERE / "static" / name).read_bytes()
    headers = {"Content-Type": f"{_STATIC[name]}; charset=utf-8", "Cache-Control": "no-cache"}
    return web.Response(body=body, headers=headers)


async def _detail(request: web.Request) -> Detail | None:
    return await request.app[_SOURCE].detail(*_job_of(request))


def _job_of(request: web.Request) -> tuple[str, str]:
    """Namespace and name as the URL has them, in which `%2F` and `%3F` are decoded.

    Raises:
        HTTPNotFound: no object of a cluster can have them. A folder may have jobs of other names.
    """
    namespace, name = request.match_info["namespace"], request.match_info["name"]
    possible = NAMESPACE.fullmatch(namespace) is not None and NAME.fullmatch(name) is not None
    if request.app[_SOURCE].scope is Scope.CLUSTER and not possible:
        raise web.HTTPNotFound
    return namespace, name


def _log_query(request: web.Request) -> LogQuery:
    """What the query asks for; a number that is none is left out, or that is longer than any can be."""
    given = {name: int(text) for name, text in request.query.items() if _NUMBER.fullmatch(text)}
    tail = min(given.get("tail", LogQuery().tail), _MOST_LINES)
    return LogQuery(given.get("rank"), given.get("attempt"), tail)


def _no_such_job(request: web.Request) -> web.Response:
    namespace, name = _job_of(request)
    message = f"There is no job {name} in {namespace}. It may have been deleted."
    if request.app[_SOURCE].scope is Scope.CLUSTER:
        message += (
            f" ddpjob logs {shlex.quote(name)} -n {shlex.quote(namespace)} prints its logs if its volume is left."
        )
    return _error(request, 404, "No such job", message)


def _error(request: web.Request, status: int, title: str, message: str) -> web.Response:
    # a source that does not answer now may answer later
    return _page(request, "error.html", status, title=title, message=message, seconds=5 if status == 502 else 0)


def _page(request: web.Request, template: str, status: int = 200, **values: Any) -> web.Response:
    text = request.app[_TEMPLATES].get_template(template).render(source=request.app[_SOURCE], **values)
    return web.Response(text=text, content_type="text/html", status=status)


@cache
def _templates() -> jinja2.Environment:
    """Nothing in it is of one application: all of a process share it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["count"] = lambda number: f"{number:,}"
    environment.globals["path_of"] = path_of
    # compiled now, and not while somebody waits for the first page
    for name in environment.list_templates():
        environment.get_template(name)
    return environment


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
