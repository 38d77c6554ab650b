"""The pages without a mouse: real keys, in a real browser, reach and use everything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.support.browser import Tab, browser, new_tab
from tests.unit.page.conftest import Folder

from ddpjob_operator.page.folder import FolderSource
from ddpjob_operator.page.server import serve

pytestmark = pytest.mark.local

JOBS = tuple(f"job-{number}" for number in range(7))
FAILURE = {
    "attempt": 0, "time": "2030-01-01T00:00:09Z", "reason": "WorkerException", "message": "no data", "logTail": "end\n"
}  # fmt: skip
CONTROLS = """
[...document.querySelectorAll('a[href], button, input:not([type=hidden]), select, summary, [tabindex="0"]')]
  .filter(each => each.checkVisibility())
"""
FOCUS = f"""
(() => {{
  const focused = document.activeElement, style = getComputedStyle(focused), box = focused.getBoundingClientRect();
  return {{
    index: {CONTROLS.strip()}.indexOf(focused),
    marked: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2 || style.boxShadow !== 'none',
    seen: box.bottom > 0 && box.top < innerHeight && box.width > 1 && box.height > 1,
    what: focused.outerHTML.slice(0, 200),
  }};
}})()
"""


@pytest.fixture
async def pages(tmp_path: Path) -> AsyncIterator[tuple[Tab, str]]:
    """A window, and the URL of the pages of some jobs, the first of which has failed."""
    folder = Folder(tmp_path / "shared")
    now = datetime.now(UTC)
    for age, name in enumerate(JOBS):
        folder.status(name, phase="Succeeded", startTime=(now - timedelta(hours=age)).isoformat())
        folder.log(f"{name}-0-0", "epoch 0\n")
    folder.status(JOBS[0], phase="Failed", failures=[FAILURE], lastFailure=FAILURE)
    folder.events(JOBS[0], {"event": "started", "step": 0})
    runner, url = await serve(FolderSource.at(folder.root), "127.0.0.1", 0)
    async with new_tab(browser(), tmp_path / "profile") as tab:
        yield tab, url.rstrip("/")
        assert tab.complaints == []
    await runner.cleanup()


async def test_the_tab_key_reaches_every_control_in_order_and_the_focus_is_seen(pages: tuple[Tab, str]) -> None:
    tab, url = pages
    # copy buttons, the log and the list of events are on the second page; fields and choices on the others
    for path, fewest in (("/", 12), (f"/jobs/local/{JOBS[0]}", 10), (f"/jobs/local/{JOBS[0]}/logs", 8)):
        await tab.open(url + path)
        count = await tab.run(f"{CONTROLS}.length")
        assert count >= fewest, path
        for index in range(count):
            await tab.press("Tab")
            focus = await tab.run(FOCUS)
            assert (focus["index"], focus["marked"], focus["seen"]) == (index, True, True), (path, focus["what"])


async def test_the_enter_key_follows_links_and_sends_the_filter(pages: tuple[Tab, str]) -> None:
    tab, url = pages
    await tab.open(f"{url}/")
    await tab.press("Tab")
    await tab.press("Enter")  # the first link skips the header
    assert await tab.run("document.activeElement.id") == "content"
    await to(tab, "input[type=search]")
    await tab.call("Input.insertText", text="job-3")
    await tab.press("Enter")
    await arrived(tab, "/?name=job-3")
    await to(tab, "#jobs a")
    await tab.press("Enter")
    await arrived(tab, "/jobs/local/job-3")
    assert await tab.text("h1") == "job-3"


@pytest.mark.parametrize("key", ["Enter", " "])
async def test_a_key_copies_a_command_and_the_focus_stays_when_the_page_is_made_anew(
    pages: tuple[Tab, str], key: str
) -> None:
    tab, url = pages
    await tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    await tab.open(f"{url}/jobs/local/{JOBS[0]}")
    await to(tab, "#commands .copy")
    await tab.press(key)
    await tab.comes_true("document.getElementById('announcer').textContent === 'Copied'", "it says that it has copied")
    command = await tab.run("document.activeElement.dataset.copy")
    assert command.startswith("tail -f ")
    assert await tab.run("navigator.clipboard.readText()") == command
    # the button is another one now, and so the part is replaced
    await tab.run("document.activeElement.classList.add('done'), refresh()")
    assert await tab.run("document.activeElement.dataset.copy") == command


async def test_what_is_opened_by_a_key_keeps_the_focus_when_the_page_is_made_anew(pages: tuple[Tab, str]) -> None:
    tab, url = pages
    await tab.open(f"{url}/jobs/local/{JOBS[0]}")
    await to(tab, "#failures-first summary")
    await tab.press("Enter")
    assert await tab.run("document.activeElement.parentElement.open")
    await tab.run("document.getElementById('failures-first').append('changed'), refresh()")
    assert await tab.run("document.activeElement.matches('details[open] > summary')")


async def to(tab: Tab, selector: str) -> None:
    """Press Tab until such an element has the focus."""
    count = await tab.run(f"{CONTROLS}.length")
    for _ in range(count):
        await tab.press("Tab")
        if await tab.run(f"document.activeElement.matches({selector!r})"):
            return
    pytest.fail(f"the Tab key does not reach {selector}")


async def arrived(tab: Tab, path: str) -> None:
    there = f"location.pathname + location.search === {path!r} && document.readyState === 'complete'"
    await tab.comes_true(there, f"{path} is opened")
