"""An object that is nested too deeply for a decoder hides no other one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kopf._cogs.clients.api import iter_jsonlines
from kopf._cogs.clients.errors import APINotFoundError, APIServerError, check_response
from tests.unit.answers import Server

from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.decode import LEVELS, cut, decode
from ddpjob_operator.runtime.login import log_in, open_session
from ddpjob_operator.wire.pods import decode_pods

GO_LIMIT = 10_000
"""The API server's own decoder takes no more."""


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def depth(value: Any) -> int:
    levels, layer = 0, [value]
    while layer := [item for item in layer if isinstance(item, dict | list)]:
        levels += 1
        layer = [inner for item in layer for inner in (item.values() if isinstance(item, dict) else item)]
    return levels


def listed(*specs: str) -> str:
    items = ",".join(f'{{"metadata":{{"name":"{index}"}},"spec":{spec}}}' for index, spec in enumerate(specs))
    return f'{{"metadata":{{"resourceVersion":"7"}},"items":[{items}]}}'


@pytest.mark.parametrize("levels", [1_000, GO_LIMIT])
async def test_a_list_is_read_although_one_object_is_too_deep(server: Server, client: Client, levels: int) -> None:
    server.answers = [web.Response(text=listed("{}", deep(levels), '{"nodes":2}'), content_type="application/json")]
    items, version = await client.list("/apis/any", "ddpjobs")
    assert version == 7
    assert [item["metadata"]["name"] for item in items] == ["0", "1", "2"]
    assert items[2]["spec"] == {"nodes": 2}
    assert depth(items[1]) < 200


@pytest.mark.parametrize("item", [deep(1_000), "7"], ids=["too deep", "no object"])
async def test_a_page_that_its_decoder_cannot_read_is_decoded_whole(server: Server, client: Client, item: str) -> None:
    page = f'{{"metadata":{{"resourceVersion":"7"}},"items":[{{"metadata":{{}},"spec":{item},"extra":1}}]}}'
    server.answers = [web.Response(text=page, content_type="application/json")]
    (found,) = [page async for page in client.pages("/api/v1/pods", "pods", 100, decode_pods)]
    assert found.items[0]["extra"] == 1


@pytest.mark.usefixtures("client")
async def test_a_watch_goes_on_after_an_object_that_is_too_deep(server: Server) -> None:
    events = [f'{{"type":"ADDED","object":{{"n":{n},"spec":{deep(levels)}}}}}' for n, levels in enumerate((1, 5000, 1))]
    server.answers = [web.Response(text="\n".join(events))]
    async with open_session(await log_in()) as session, session.get(f"{server.url}/watch") as response:
        lines = [json.loads(line) async for line in iter_jsonlines(response.content, chunk_size=1000)]
    assert [line["object"]["n"] for line in lines] == [0, 1, 2]


@pytest.mark.usefixtures("client")
async def test_what_ends_a_stream_is_raised_without_the_stream(server: Server) -> None:
    """The stream keeps its error. With the frames that it came through it would be a cycle, which is never freed where
    a full collection came while the watch lasted."""

    async def broken(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{}\n")
        assert request.transport is not None
        request.transport.close()
        return response

    server.answers = [broken]
    async with open_session(await log_in()) as session, session.get(f"{server.url}/watch") as response:
        lines = aiter(response.content.iter_chunked(1000))
        assert await anext(lines) == b"{}\n"
        with pytest.raises(aiohttp.ClientPayloadError) as ended:
            await anext(lines)
        kept = response.content.exception()
    assert isinstance(kept, aiohttp.ClientPayloadError)
    assert kept is not ended.value
    assert kept.__traceback__ is None
    assert str(kept) == str(ended.value)
    assert kept.__cause__ is ended.value.__cause__


@pytest.mark.usefixtures("client")
async def test_a_stream_whose_session_was_closed_ends_by_an_error_of_the_connection(server: Server) -> None:
    """kopf closes the session of all watches where one is refused with 401, and goes on after such an error alone."""

    over = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await over.wait()
        return response

    server.answers = [endless]
    async with open_session(await log_in()) as session, session.get(f"{server.url}/watch") as response:
        await session.close()
        with pytest.raises(aiohttp.ClientConnectionError):
            await anext(aiter(response.content.iter_chunked(1000)))
    over.set()


@pytest.mark.usefixtures("client")
async def test_a_list_of_a_library_is_read_too(server: Server) -> None:
    server.answers = [web.Response(text=listed(deep(5000)), content_type="application/json")]
    async with open_session(await log_in()) as session, session.get(f"{server.url}/list") as response:
        assert len((await response.json())["items"]) == 1


def test_what_is_cut_is_what_is_too_deep_and_nothing_else() -> None:
    text = '{"a":[[[1]],"[[[[",{"b":{"c":{}}}],"e":"\\\\\\"[","d":[2]}'
    assert json.loads(cut(text.encode(), levels=3)) == {"a": [[None], "[[[[", {"b": None}], "e": '\\"[', "d": [2]}


@pytest.mark.parametrize("levels", [1, LEVELS - 1])
def test_nothing_is_cut_from_what_is_shallow(levels: int) -> None:
    assert decode(deep(levels).encode()) == json.loads(deep(levels))


@pytest.mark.parametrize("text", ["", "{", "[" * 5000, "]" * 5000, '{"a":"' + "[" * 5000, "<html>", '{"a":1}}'])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        decode(text.encode())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (web.Response(status=503, text="<html>503 Service Unavailable</html>"), APIServerError),
        (web.Response(status=502, body="La passerelle a \xe9chou\xe9".encode("latin-1")), APIServerError),
        (web.Response(status=503), APIServerError),
        (web.Response(status=404, text="404 page not found"), APINotFoundError),
    ],
    ids=["a page", "of another encoding", "nothing", "no such path"],
)
async def test_a_watch_takes_the_page_of_a_proxy_for_the_error_that_its_status_is(
    server: Server, client: Client, answer: web.Response, error: type[Exception]
) -> None:
    """The library tries again what a server could not answer. Of any other exception its watch ends for good."""
    server.answers = [answer]
    async with open_session(await log_in()) as session, session.get(f"{server.url}/watch") as response:
        with pytest.raises(error):
            await check_response(response)
