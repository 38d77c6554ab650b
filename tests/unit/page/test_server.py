"""The pages as a browser gets them: each answers, what jobs wrote stays text, and no other site can read it."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator
from html.parser import HTMLParser
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession
from aiohttp.test_utils import TestClient, TestServer
from jinja2 import Environment
from tests.support.waiting import PATIENCE_SECONDS
from tests.unit.page.conftest import TIME, Folder

from ddpjob_operator.follow.lines import Line
from ddpjob_operator.page import server
from ddpjob_operator.page.folder import FolderSource
from ddpjob_operator.page.server import is_own_host, make_app, serve
from ddpjob_operator.page.values import LogQuery, SourceError

Browser = TestClient[Any, Any]

EVIL = "<script>alert(1)</script>"
FAILURE = {
    "attempt": 0, "time": TIME.format(20), "reason": EVIL, "message": EVIL, "advice": EVIL, "podName": EVIL,
    "logTail": EVIL, "step": 3,
}  # fmt: skip
STATUS = {
    "phase": "Failed", "attempt": 1, "restarts": 1, "startTime": TIME.format(1), "completionTime": TIME.format(30),
    "progress": {"step": 4, "totalSteps": 10, "loss": 1.0, "metrics": {EVIL: 1.0}},
    "goodput": {"training": 5, "ratio": 0.5}, "failures": [FAILURE], "lastFailure": FAILURE,
    "corruptSnapshots": [EVIL], "conditions": [
        {"type": "Failed", "status": "True", "reason": EVIL, "message": EVIL, "lastTransitionTime": TIME.format(9)}
    ],
}  # fmt: skip


@pytest.fixture
async def client(folder: Folder) -> AsyncIterator[Browser]:
    async with TestClient(TestServer(make_app(FolderSource.at(folder.root)))) as found:
        yield found


def whole_job(folder: Folder, name: str) -> None:
    folder.status(name, **STATUS)
    folder.losses(name, 0, 0, [3.0, 2.0, 1.0, 0.9])
    folder.losses(name, 1, 2, [1.5, None, 1.2])
    folder.events(
        name, {"event": EVIL, "message": EVIL, "step": 1}, {"event": "validated", "step": 2, "eval_loss": 1.1}
    )
    folder.snapshot(name, 2, kind=EVIL)
    folder.set_aside(name, 1, EVIL)
    folder.log(f"{name}-1-0", f"{EVIL}\n")
    folder.stacks(name, "0", EVIL)


class Document(HTMLParser):
    """Start tags with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


async def page(client: Browser, path: str, status: int = 200) -> tuple[str, Document]:
    answer = await client.get(path)
    text = await answer.text()
    assert answer.status == status, text
    return text, Document(text)


@pytest.mark.parametrize("path", ["/", "/jobs/local/digits", "/jobs/local/digits/logs", "/?phase=Failed&name=dig"])
async def test_what_a_job_wrote_stays_text_on_every_page(client: Browser, folder: Folder, path: str) -> None:
    whole_job(folder, "digits")
    text, document = await page(client, path)
    assert EVIL not in text
    assert "&lt;script&gt;" in text
    assert [tag.get("src") for tag in document.all("script")] == ["/static/page.js"]


async def test_a_job_has_its_throughput_as_a_picture_and_in_words(client: Browser, folder: Folder) -> None:
    folder.losses("digits", 0, 0, [3.0, 2.0, 1.0], rate=812.5)
    text, document = await page(client, "/jobs/local/digits")
    said = [svg.get("aria-label") or "" for svg in document.all("svg") if svg.get("class") == "chart wide"]
    assert any(label.startswith("Throughput of all ranks: a median of 812.5 samples/s") for label in said)
    assert text.count('<text class="title" x="0" y="12">samples per second</text>') == 2
    folder.losses("digits", 0, 0, [3.0, 2.0, 1.0])
    assert "No throughput." in (await page(client, "/jobs/local/digits"))[0]


async def test_a_name_that_is_markup_stays_text_and_has_a_page(client: Browser, folder: Folder) -> None:
    name = '"><img src=x onerror=alert(1)>'
    (folder.root / "logs" / name).mkdir(parents=True)
    text, document = await page(client, "/")
    assert "<img src=x" not in text
    (link,) = [a["href"] for a in document.all("a") if (a.get("href") or "").startswith("/jobs/")]
    assert link is not None
    text, _ = await page(client, link)
    assert "<img src=x" not in text
    _, searched = await page(client, f"/?name={link}&phase={EVIL}")
    assert len(searched.all("script")) == 1


async def test_nothing_is_inline_and_nothing_is_loaded_from_elsewhere(client: Browser, folder: Folder) -> None:
    whole_job(folder, "digits")
    for path in ("/", "/jobs/local/digits", "/jobs/local/digits/logs", "/none"):
        text, document = await page(client, path, 404 if path == "/none" else 200)
        assert not document.all("style"), path
        for tag, attributes in document.tags:
            assert not [name for name in attributes if name == "style" or name.startswith("on")], (path, tag)
            for name in ("src", "href"):
                assert re.match(r"/(?!/)|#|$", attributes.get(name) or ""), (path, tag, attributes)
        assert "http://" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize("path", ["/", "/jobs/local/digits", "/none", "/static/style.css", "/jobs/local/none"])
async def test_every_answer_forbids_what_the_pages_do_not_need(client: Browser, folder: Folder, path: str) -> None:
    whole_job(folder, "digits")
    headers = (await client.get(path)).headers
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'; ")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Set-Cookie" not in headers


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/jobs/local/none", 404),
        ("/jobs/other/digits", 404),
        ("/jobs/local/none/logs", 404),
        ("/jobs/local/none/logs/stream", 404),
        ("/jobs/local/..%2f..%2fetc", 404),
        ("/static/../server.py", 404),
        ("/static/server.py", 404),
        ("/favicon.ico", 404),
        ("/jobs/local/digits/logs?rank=x&tail=-1&attempt=9", 200),
        ("/jobs/local/digits/logs?tail=99999999999999999999", 200),
        *((f"/jobs/local/digits/logs?{name}={'9' * 5000}", 200) for name in ("rank", "attempt", "tail", "other")),
        (f"/jobs/local/digits/logs/stream?rank={'9' * 5000}", 200),
    ],
)
async def test_what_is_not_there_is_said_so(client: Browser, folder: Folder, path: str, status: int) -> None:
    whole_job(folder, "digits")
    await page(client, path, status)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_nothing_can_be_changed(client: Browser, method: str) -> None:
    assert (await client.request(method, "/")).status == 405


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1:8265", True), ("localhost:9000", True), ("LOCALHOST", True), ("[::1]:8265", True),
        ("10.1.2.3", True), ("evil.example:8265", False), ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False), ("", False), ("node-7:8265", False),
    ],
)  # fmt: skip
async def test_a_domain_that_was_pointed_here_gets_nothing(client: Browser, host: str, own: bool) -> None:
    assert is_own_host(host, frozenset()) is own
    if host:
        answer: ClientResponse = await client.get("/", headers={"Host": host})
        assert answer.status == (200 if own else 421)


def test_a_machine_that_serves_others_may_be_called_by_its_name() -> None:
    assert is_own_host("Node-7:8265", frozenset({"node-7"}))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("logs/evil/events.jsonl", {"time": 10**400, "event": "started", "attempt": 0}),
        ("logs/evil/events.jsonl", {"time": 1.0, "event": "epoch", "attempt": 0, "epoch": 10**400, "step": 10**400}),
        ("logs/evil/losses/001893456000-000001-u.jsonl", {"step": 10**400, "loss": 1e308, "attempt": 0}),
        ("logs/evil/ranks.json", {"uid": "u", "attempt": 0, "ranks": [{"rank": 10**400, "stepSeconds": 10**400}]}),
        ("checkpoints/evil/step-000000000003/manifest.json", {"files": {"a": {"bytes": 10**400}}}),
        ("checkpoints/evil/run.lock", {"pid": 2**62, "host": os.uname().nodename}),
        ("checkpoints/evil/run.lock", {"pid": 10**400, "host": os.uname().nodename}),
        ("logs/evil/status.json", {"status": {"phase": "Running", "progress": {"step": None, "totalSteps": 10}}}),
        ("logs/evil/status.json", {"status": {"phase": "Running", "progress": {"step": 10**400, "totalSteps": 10}}}),
        ("logs/evil/status.json", {"status": {"phase": "Failed", "attempt": 10**15}, "nodes": 10**15}),
        ("logs/evil/status.json", {"status": {"phase": "Failed", "goodput": {"queued": float("inf")}}}),
        (
            "logs/evil/status.json",
            {"status": {"phase": "Failed", "startTime": "2030-01-01", "progress": {"step": 1, "eta": "2030-01-01"}}},
        ),
    ],
)
async def test_what_a_job_has_written_keeps_no_page_from_being_read(
    client: Browser, folder: Folder, file: str, content: dict[str, Any]
) -> None:
    folder.losses("evil", 0, 0, [3.0, 2.0])
    folder.events("evil", {"event": "started"})
    folder.log("evil-0-0", "hello\n")
    folder.write(folder.root / file, json.dumps(content))
    for path in ("/", "/jobs/local/evil", "/jobs/local/evil/logs"):
        await page(client, path)


async def test_without_a_job_the_page_says_how_to_start_one(client: Browser, folder: Folder) -> None:
    text, _ = await page(client, "/")
    assert f"ddpjob run job.yaml --shared {folder.root}" in text
    assert "<table" not in text


async def test_a_job_with_nothing_yet_has_every_part(client: Browser, folder: Folder) -> None:
    (folder.root / "logs" / "digits").mkdir(parents=True)
    text, _ = await page(client, "/jobs/local/digits")
    for words in (
        "No step is on record.",
        "No losses.",
        "No attempt has begun.",
        "No pods.",
        "No snapshot yet.",
    ):
        assert words in text
    await page(client, "/jobs/local/digits/logs")


def parts_of(text: str) -> list[str]:
    """The headings of a page, in their order."""
    return re.findall(r"<h2[^>]*>(.*?)</h2>", text)


async def test_a_job_that_failed_before_its_first_step_begins_with_its_failure(client: Browser, folder: Folder) -> None:
    failed = STATUS | {"progress": None, "conditions": [], "failures": [FAILURE | {"step": None}]}
    folder.status("digits", **(failed | {"lastFailure": FAILURE | {"step": None}}))
    text, _ = await page(client, "/jobs/local/digits")
    assert parts_of(text)[:4] == ["Why", "Failures", "Progress", "Time"]
    assert "No losses." not in text
    assert "No throughput." not in text


async def test_a_job_that_failed_later_begins_with_its_failure_and_has_its_charts(
    client: Browser, folder: Folder
) -> None:
    whole_job(folder, "digits")
    text, _ = await page(client, "/jobs/local/digits")
    assert parts_of(text)[:5] == ["Why", "Failures", "Progress", "Loss", "Throughput"]
    folder.status("digits", **(STATUS | {"phase": "Running", "conditions": [], "completionTime": None}))
    folder.holds("digits")
    text, _ = await page(client, "/jobs/local/digits")
    assert parts_of(text)[:4] == ["Progress", "Loss", "Throughput", "Time"]
    assert parts_of(text).count("Failures") == 1


def test_templates_are_compiled_before_the_first_request(folder: Folder) -> None:
    server._templates.cache_clear()  # another test's requests may have compiled them
    environment = next(
        value for value in make_app(FolderSource.at(folder.root)).values() if isinstance(value, Environment)
    )  # fmt: skip
    assert environment.cache is not None
    assert len(environment.cache) == len(environment.list_templates()) > 0


async def test_a_thousand_jobs_are_one_list(client: Browser, folder: Folder) -> None:
    for number in range(1000):
        folder.status(f"job-{number:04}", phase="Running" if number % 2 else "Failed")
    text, document = await page(client, "/")
    assert len([a for a in document.all("a") if (a.get("href") or "").startswith("/jobs/")]) == 1000
    assert "Failed <b>500</b>" in text


async def test_tables_figures_and_parts_can_be_read_by_a_screen_reader(client: Browser, folder: Folder) -> None:
    whole_job(folder, "digits")
    for path in ("/", "/jobs/local/digits", "/jobs/local/digits/logs"):
        text, document = await page(client, path)
        assert len(document.all("table")) == len(document.all("caption")), path
        assert all(cell.get("scope") in ("col", "row") for cell in document.all("th")), path
        assert all("aria-hidden" in svg or svg.get("aria-label") for svg in document.all("svg")), path
        assert len(document.all("h1")) == len(document.all("main")) == 1
        assert 'lang="en"' in text
        ids = [attributes["id"] for _, attributes in document.tags if "id" in attributes]
        assert len(ids) == len(set(ids)), path
        labels = {attributes.get("aria-labelledby") for _, attributes in document.tags} - {None}
        assert labels <= set(ids), path


async def test_lines_are_streamed_as_events_until_the_job_has_ended(client: Browser, folder: Folder) -> None:
    whole_job(folder, "digits")
    answer = await client.get("/jobs/local/digits/logs/stream?rank=0")
    assert answer.content_type == "text/event-stream"
    line, end = (await answer.text()).strip().split("\n\n")
    assert json.loads(line.removeprefix("event: line\ndata: ")) == {"rank": 0, "colour": 0, "stamp": "", "text": EVIL}
    assert end == "event: end\ndata: {}"


async def test_a_window_that_is_closed_ends_what_it_follows(folder: Folder) -> None:
    ended = asyncio.Event()

    class Silent(FolderSource):
        async def follow(self, namespace: str, name: str, query: LogQuery) -> AsyncGenerator[Line]:
            try:
                yield Line("", 0, 0, "one")
                await asyncio.Event().wait()
            finally:
                ended.set()

    whole_job(folder, "digits")
    runner, url = await serve(Silent.at(folder.root), "127.0.0.1", 0)
    try:
        async with ClientSession() as session, session.get(f"{url}jobs/local/digits/logs/stream") as answer:
            assert b"one" in await answer.content.readuntil(b"\n\n")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await ended.wait()
    finally:
        await runner.cleanup()


async def test_a_stream_that_breaks_has_no_end_so_that_the_browser_connects_again(folder: Folder) -> None:
    class Breaks(FolderSource):
        async def follow(self, namespace: str, name: str, query: LogQuery) -> AsyncGenerator[Line]:
            yield Line("", 0, 0, "one")
            raise SourceError("no connection")

    whole_job(folder, "digits")
    async with TestClient(TestServer(make_app(Breaks.at(folder.root)))) as client:
        text = await (await client.get("/jobs/local/digits/logs/stream")).text()
    assert "one" in text
    assert "event: end" not in text


async def test_a_source_that_does_not_answer_is_said_so_and_asked_again(folder: Folder) -> None:
    class Away(FolderSource):
        async def jobs(self) -> Any:
            raise SourceError(f"no connection {EVIL}")

    async with TestClient(TestServer(make_app(Away.at(folder.root)))) as client:
        text, document = await page(client, "/", 502)
    assert "no connection &lt;script&gt;" in text
    assert document.all("body")[0]["data-seconds"] == "5"


async def test_it_listens_where_it_says(folder: Folder) -> None:
    runner, url = await serve(FolderSource.at(folder.root), "127.0.0.1", 0)
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        with pytest.raises(OSError, match="in use"):
            await serve(FolderSource.at(folder.root), "127.0.0.1", runner.addresses[0][1])
    finally:
        await runner.cleanup()
