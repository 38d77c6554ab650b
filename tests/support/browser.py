"""A real Chromium without a window, over the DevTools protocol: pages as people get them, and what the browser says.

Protocol: https://chromedevtools.github.io/devtools-protocol/. Only what the tests need, without a driver of its own.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tests.support import tiers
from tests.support.waiting import PATIENCE_SECONDS, eventually_async

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
KEYS = {"Tab": ("Tab", 9, ""), "Enter": ("Enter", 13, "\r"), " ": ("Space", 32, " ")}
"""Name of a key by what it means: its place on a keyboard, its code, and what it types."""
_NO_SANDBOX = ("--no-sandbox",)
"""Chromium refuses to run as root with its sandbox."""
_LEFT = "Inspected target navigated or closed"
"""What Chromium answers to a question about a document that the tab left before it could answer."""


class DocumentLeft(AssertionError):
    """The tab went on to another document while it was asked about this one."""


def browser_program() -> str | None:
    """Where it is, if there is one."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def browser() -> str:
    """Where it is. Without one, a test cannot run."""
    return tiers.program("browser", *PROGRAMS)


@dataclass
class Tab:
    """One page. `complaints` has what the browser reported: errors of scripts, and what its policies blocked."""

    socket: aiohttp.ClientWebSocketResponse
    complaints: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)

    async def open(self, url: str, width: int = 1280, scheme: str = "light") -> None:
        """Go there, in a window of this width, and wait until it is loaded."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **screen)
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.call("Page.navigate", url=url)
        is_loaded = "location.href !== 'about:blank' && document.readyState === 'complete'"
        await self.comes_true(is_loaded, f"{url} is loaded")

    async def run(self, script: str) -> Any:
        """What a JavaScript expression, or the promise that it is, has as its value."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def text(self, selector: str) -> str:
        """The text of the first such element; empty if there is none."""
        found = await self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return str(found)

    async def until(self, selector: str, holds: Callable[[str], bool], what: str) -> None:
        """Until the text of an element is as it should be, in this document or in one that the tab goes on to."""
        await self._until(lambda: self.text(selector), holds, what)

    async def comes_true(self, script: str, what: str) -> None:
        """Until a JavaScript expression is true, in this document or in one that the tab goes on to."""
        await self._until(lambda: self.run(script), bool, what)

    async def _until(self, ask: Callable[[], Awaitable[Any]], holds: Callable[[Any], bool], what: str) -> None:
        async def look() -> bool:
            try:
                return holds(await ask())
            except DocumentLeft:
                return False

        await eventually_async(look, what)

    async def press(self, key: str) -> None:
        """A key of a real keyboard, one of `KEYS`: the browser does what it does for a person."""
        place, code, text = KEYS[key]
        given = {"key": key, "code": place, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **given, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    async def screenshot(self, height: int | None = None) -> bytes:
        """The whole page, or its upper part, as PNG."""
        width, whole = await self.run("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height or whole, "scale": 1}
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(answer["data"])

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._answers[number]

    async def listen(self) -> None:
        """Take what the browser says, until it says no more."""
        async for message in self.socket:
            said = message.json()
            if "id" in said:
                answer = self._answers.pop(said["id"])
                if "error" in said:
                    refusal = DocumentLeft if said["error"].get("message") == _LEFT else AssertionError
                    answer.set_exception(refusal(said["error"]))
                else:
                    answer.set_result(said["result"])
            elif said["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] in ("error", "warning"):
                self.complaints.append(said["params"]["entry"]["text"])


@asynccontextmanager
async def new_tab(program: str, profile: Path) -> AsyncIterator[Tab]:
    """A browser with a new profile and one empty page; it ends with the block."""
    options = (
        "--headless", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
        "--remote-debugging-port=0", f"--user-data-dir={profile}",
    )  # fmt: skip
    as_root = _NO_SANDBOX if os.geteuid() == 0 else ()
    nothing = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        program,
        *options,
        *as_root,
        "about:blank",
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        start_new_session=True,
    )
    try:
        port = await eventually_async(lambda: _port(process, profile), "the browser listens")
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                target = await answer.json()
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                listening = asyncio.create_task(tab.listen())
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                try:
                    yield tab
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _port(process: asyncio.subprocess.Process, profile: Path) -> str | None:
    assert process.returncode is None, f"the browser has ended: {process.returncode}"
    file = profile / "DevToolsActivePort"
    return file.read_text().split()[0] if file.exists() and file.read_text().count("\n") else None
