"""`ddpjob dashboard` in a real browser, while a run trains, loses a rank and ends: nothing is reloaded by hand."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any, cast

import pytest
from tests.benchmarks.bench_page import JOBS, Server
from tests.local.conftest import Run, held, let_go
from tests.support.accessible import comes_to_rest, looks_right
from tests.support.browser import Tab, browser, new_tab
from tests.support.dashboard import dashboard
from tests.support.local_run import environment

from ddpjob_operator.page.cluster import ClusterSource
from ddpjob_operator.page.files import course_of
from ddpjob_operator.page.server import serve
from ddpjob_operator.page.shared import Shared
from ddpjob_operator.runtime.client import Client

pytestmark = pytest.mark.local

STEPS = 920
SPEC = {
    "nodes": 2,
    **held(400, epochs=40),
    "snapshots": {"every": "50steps"},
    "restart": {"backoff": {"initialSeconds": 0}},
}
EVIL = '<img src="/none" onerror="window.ran = 1"><script>window.ran = 2</script>'
RECORD = """
window.phases = [document.querySelector('#head .badge').innerText.trim()];
new MutationObserver(() => window.phases.push(document.querySelector('#head .badge').innerText.trim()))
  .observe(document.getElementById('head'), {childList: true, subtree: true, characterData: true});
"""
"""Notes each phase that is shown, in the document as it was opened."""
TIME = re.compile(r"\d m?s\b")
FAILED = {"phase": "Failed"}
FORMS = (("light", 1280), ("dark", 360))


ROWS = "[...document.querySelectorAll('#jobs tbody tr')]"


class Fleet(Server):
    """A cluster with many jobs, one of which fails."""

    failed = False

    async def list(self, path: str, resource: str) -> tuple[list[dict[str, Any]], int]:
        jobs, version = await super().list(path, resource)
        if self.failed:
            job = jobs[JOBS // 2]
            job |= {"metadata": job["metadata"] | {"resourceVersion": "2"}, "status": job["status"] | FAILED}
        return jobs, version


async def test_a_run_is_watched_moving_failing_and_explained(run_job: Run, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "logs").mkdir(parents=True)
    with dashboard(tmp_path / "dashboard.txt", environment(), "--shared", str(shared)) as url:
        async with new_tab(browser(), tmp_path / "profile") as tab:
            await tab.open(f"{url}/")
            assert "No job yet" in await tab.text("#jobs")
            run = run_job(SPEC, "--shared", str(shared))
            await tab.until("#jobs", lambda text: "digits" in text, "the job appears in the list")

            await tab.open(f"{url}/jobs/local/digits/logs")
            await asyncio.to_thread(run.until, lambda: reported(shared), "a snapshot, and times of both ranks")
            await tab.until("#lines", lambda text: "epoch 0 (after step 23)" in text, "its lines are streamed")

            await tab.open(f"{url}/jobs/local/digits")
            await tab.run(RECORD)
            before = steps(await tab.text("#progress .big"))
            assert before > 0
            cells = await tab.run("[...document.querySelectorAll('#ranks tbody tr')].map(row => row.innerText)")
            # of a step, of its wait for data, of its passes
            assert all(len(TIME.findall(cell)) == 3 and cell.endswith(" ago") for cell in cells), cells
            assert [cell.split()[:2] for cell in cells] == [["0", "digits-0-0"], ["1", "digits-0-1"]]
            os.kill(run.pid_of_rank(1), signal.SIGKILL)
            await tab.until("#progress .big", lambda text: steps(text) > 400, "its steps move")
            await tab.until("#head", lambda text: "Running" in text, "it runs again")
            await comes_to_rest(tab)
            let_go(shared, attempt=1)
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
            await all_look_right(tab, url)


def reported(shared: Path) -> bool:
    """Whether the first attempt has a snapshot and charts, an epoch in its log, and times of both ranks."""
    folder = shared / "logs" / "digits"
    try:
        status = json.loads((folder / "status.json").read_text())["status"]
        ranks = json.loads((folder / "ranks.json").read_text())["ranks"]
        log = (folder / "pods" / "digits-0-0.log").read_text()
    except FileNotFoundError:
        return False
    times = [rank[of] for rank in ranks for of in ("stepSeconds", "dataSeconds", "passesSeconds")]
    # a step that the next attempt does not train again is in the charts as one of this attempt
    snapshot = (status.get("snapshot") or {}).get("step", 0)
    rates = [point for point in course_of(Shared(shared), "digits", []).kept if point.samples_per_second is not None]
    return (
        any(point.step <= snapshot for point in rates)
        and (status.get("progress") or {}).get("step", 0) > 0
        and len(times) == 6
        and None not in times
        and "epoch 0 (after step 23)" in log
    )


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


async def all_look_right(tab: Tab, url: str) -> None:
    """Every page, light and dark: accessible, as wide as a phone, and without a script of a job's own."""
    for path in ("/", "/jobs/local/digits", "/jobs/local/digits/logs", "/jobs/local/evil", "/jobs/local/evil/logs"):
        await looks_right(tab, url + path, FORMS)
        assert await tab.run("window.ran ?? 0") == 0, path


async def test_a_list_of_a_thousand_jobs_is_shown_kept_current_and_filtered(tmp_path: Path) -> None:
    """What it takes is counted in tests/unit/page/test_long_lists.py."""
    fleet = Fleet()
    runner, url = await serve(ClusterSource(cast(Client, fleet), "team"), "127.0.0.1", 0)
    try:
        async with new_tab(browser(), tmp_path / "profile") as tab:
            await tab.open(url)
            shown = f"{ROWS}.filter(row => row.getBoundingClientRect().height > 0).length"
            assert await tab.run(shown) == JOBS
            phases = (
                f"{ROWS}.filter(row => row.cells[1].innerText.includes('Failed')).map(row => row.cells[0].innerText)"
            )
            assert await tab.run(phases) == []
            fleet.failed = True
            await tab.until("#choices", lambda text: "Failed" in text, "the page is made anew")
            assert await tab.run(phases) == [f"job-{JOBS // 2:04}"]
            assert await tab.run(shown) == JOBS
            await tab.run(
                "document.querySelector('input[type=search]').value = 'job-0007',"
                "document.querySelector('form.filter').requestSubmit()"
            )
            await tab.until("#jobs tbody", lambda text: text.split()[:1] == ["job-0007"], "the list is filtered")
            assert await tab.run(f"{ROWS}.length") == 1
            assert tab.complaints == []
    finally:
        await runner.cleanup()
