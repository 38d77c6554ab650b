"""`ddpjob dashboard` in a real browser, while a run trains, loses a rank and ends: nothing is reloaded by hand."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.kubernetes import cannot_run
from tests.local.conftest import Run
from tests.support.browser import Tab, browser_program, new_tab
from tests.support.command import COMMAND
from tests.support.local_run import environment
from tests.support.waiting import eventually

pytestmark = [pytest.mark.local, pytest.mark.timeout(300)]

STEPS = 920
SPEC = {
    "nodes": 2,
    "args": ["--task", "digits", "--epochs", "40"],
    "snapshots": {"every": "50steps"},
    "restart": {"backoff": {"initialSeconds": 0}},
}
EVIL = '<img src="/none" onerror="window.ran = 1"><script>window.ran = 2</script>'
RECORD = """
window.phases = [];
new MutationObserver(() => window.phases.push(document.querySelector('#head .badge').innerText.trim()))
  .observe(document.getElementById('head'), {childList: true, subtree: true, characterData: true});
"""
"""Notes each phase that is shown, in the document as it was opened."""
VIOLATIONS = """
axe.run().then(found => found.violations.map(each => [each.id, each.help, each.nodes.map(node => node.html)]))
"""


@pytest.fixture
def program() -> str:
    """Chromium, or a visible skip."""
    found = browser_program()
    if found is None:
        cannot_run("local", "there is no Chromium; `make tools` installs Debian's")
    return found


@pytest.fixture
def axe() -> str:
    """The script of axe-core."""
    found = find_spec("axe_core_python")
    if found is None or found.origin is None:
        cannot_run("local", "axe-core-python is not installed; `make test` installs it")
    return (Path(found.origin).parent / "axe.min.js").read_text()


@contextmanager
def dashboard(shared: Path) -> Iterator[str]:
    """Its URL. It ends by Ctrl-C, at once and without a word, although windows are open."""
    output = shared.parent / "dashboard.txt"
    with output.open("wb") as out:
        command = [*COMMAND, "dashboard", "--shared", str(shared), "--port", "0"]
        process = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        said = eventually(lambda: re.match(r"http://127\.0\.0\.1:\d+", output.read_text()), "it says where it is")
        yield said[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert len(output.read_text().splitlines()) == 1, output.read_text()
    finally:
        process.kill()
        process.wait()


async def test_a_run_is_watched_moving_failing_and_explained(
    run_job: Run, program: str, axe: str, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    (shared / "logs").mkdir(parents=True)
    with dashboard(shared) as url:
        async with new_tab(program, tmp_path / "profile") as tab:
            await tab.open(f"{url}/")
            assert "No job yet" in await tab.text("#jobs")
            run = run_job(SPEC, "--shared", str(shared), "--chaos", "kill-rank@50%")
            await tab.until("#jobs", lambda text: "digits" in text, "the job appears in the list")

            await tab.open(f"{url}/jobs/local/digits/logs")
            await tab.until("#lines", lambda text: "epoch 0 (after step 23)" in text, "its lines are streamed")

            await tab.open(f"{url}/jobs/local/digits")
            await tab.run(RECORD)
            await tab.until("#progress .big", lambda text: steps(text) > 0, "it trains")
            before = steps(await tab.text("#progress .big"))
            await tab.until("#progress .big", lambda text: steps(text) > before, "its steps move")
            # of a step, of its wait for data, of its passes
            await tab.until("#ranks", lambda text: text.count(" ms") == 6, "both ranks are shown with their times")
            cells = await tab.run("[...document.querySelectorAll('#ranks tbody tr')].map(row => row.innerText)")
            assert [cell.split()[:2] for cell in cells] == [["0", "digits-0-0"], ["1", "digits-0-1"]]
            assert all(cell.count(" ms") == 3 and cell.endswith(" ago") for cell in cells), cells
            await tab.until("#failures", lambda text: "WorkerKilled" in text, "its failure is shown")
            assert "rank 1 was killed by SIGKILL" in await tab.text("#failures .message")
            assert "If no one sent it, check the memory" in await tab.text("#failures .advice")
            await tab.until("#head", lambda text: "Succeeded" in text, "its end is shown")
            assert run.end() == 0, run.text()
            assert {"Running", "Succeeded"} <= set(await tab.run("window.phases"))
            announced = await tab.run("document.getElementById('announcer').textContent")
            assert announced == "digits: Succeeded, attempt 1, 1 restarts"
            assert await tab.run("document.querySelectorAll('#time .wide .attempt').length") == 2
            assert f"finished after {STEPS} steps" in await tab.text("#log")
            assert " samples/s at step 920; the least is " in await tab.text("#throughput")
            (loss,) = re.findall(r"Loss\s+(\S+)\s+at step 920", await tab.text("#progress .figures"))
            assert f" to {loss} at step 920; the least is " in await tab.text("#loss")
            assert await tab.run("document.querySelectorAll('#throughput .wide .band').length") == 2
            assert tab.complaints == []
            plant(shared)
            await looks_right(tab, url, axe)


def steps(text: str) -> int:
    """Of such as `45% step 1,552 of 3,450`."""
    found = re.search(r"step ([\d,]+)", text)
    return int(found[1].replace(",", "")) if found else 0


def plant(shared: Path) -> None:
    """A job that tries to run a script in the window of those who look at it."""
    failure = {"attempt": 0, "time": "2030-01-01T00:00:00Z", "reason": EVIL, "message": EVIL, "logTail": EVIL}
    status = {"phase": "Failed", "failures": [failure], "lastFailure": failure, "progress": {"metrics": {EVIL: 1}}}
    pods = shared / "logs" / "evil" / "pods"
    pods.mkdir(parents=True)
    (pods.parent / "status.json").write_text(json.dumps({"version": 1, "status": status}))
    (pods / "evil-0-0.log").write_text(f"{EVIL}\n")
    (shared / "logs" / EVIL.replace("/", "")).mkdir()


async def looks_right(tab: Tab, url: str, axe: str) -> None:
    """Every page, light and dark: accessible, as wide as a phone, and without a script of a job's own."""
    for path in ("/", "/jobs/local/digits", "/jobs/local/digits/logs", "/jobs/local/evil", "/jobs/local/evil/logs"):
        for scheme, width in (("light", 1280), ("dark", 360)):
            await tab.open(url + path, width, scheme)
            await tab.run(f"{axe};0")
            assert await tab.run(VIOLATIONS) == [], (path, scheme)
            assert await tab.run("document.documentElement.scrollWidth <= innerWidth"), (path, "wider than the window")
            assert await tab.run("window.ran ?? 0") == 0, path
    await tab.open(f"{url}/jobs/local/digits")
    focused = await tab.run("document.querySelector('#commands .copy').focus(), document.activeElement.className")
    assert focused == "copy"
    assert tab.complaints == []
