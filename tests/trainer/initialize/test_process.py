"""The initializer as a process, as a pod runs it: its exit code, its message, and what it leaves when it is killed."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import PATIENCE_SECONDS, eventually
from tests.trainer.data_server import BODY, Web, left_over, refusing, whole

from ddp_trainer.initialize.__main__ import Initializer, run

pytestmark = pytest.mark.processes


def process(shared: Path, task: dict[str, Any] | str, **environ: str) -> subprocess.Popen[bytes]:
    given = {
        "DDPJOB_INITIALIZER": task if isinstance(task, str) else json.dumps({"name": "data", **task}),
        "DDPJOB_SHARED": str(shared),
        "DDPJOB_TERMINATION_LOG": str(shared.parent / "termination-log"),
    }
    command = [sys.executable, "-m", "ddp_trainer.initialize"]
    given["PYTHONPATH"] = str(Path(__file__).parents[3] / "trainer_image")
    return subprocess.Popen(command, env={**os.environ, **given, **environ}, stderr=subprocess.PIPE)


def reported(shared: Path) -> dict[str, Any]:
    message: dict[str, Any] = json.loads((shared.parent / "termination-log").read_text())
    return message


@pytest.mark.parametrize(
    ("task", "code", "reason"),
    [
        ({"path": "digits.bin", "source": "URL"}, 0, None),
        ({"path": "digits.bin", "source": "URL", "sha256": "0" * 64}, 1, "FetchFailed"),
        ({"path": "../outside", "source": "URL"}, 64, "UserError"),
        ({"path": "link/digits.bin", "source": "URL"}, 64, "UserError"),
        ({"path": "file/below", "source": "URL"}, 1, "VolumeFailed"),
        ({"path": "circle/below", "source": "URL"}, 1, "VolumeFailed"),
        ("nonsense", 64, "UserError"),
    ],
    ids=[
        "done",
        "a wrong checksum",
        "out of the volume",
        "out of it by a link",
        "below a file",
        "below a link to itself",
        "no task",
    ],
)
def test_the_exit_code_says_what_to_do_and_the_message_why(
    web: Web, shared: Path, task: dict[str, Any] | str, code: int, reason: str | None
) -> None:
    (shared / "link").symlink_to(shared.parent)
    (shared / "file").touch()
    (shared / "circle").symlink_to("circle")
    given = task if isinstance(task, str) else {**task, "source": web.url}
    with process(shared, given) as found:
        _, log = found.communicate(timeout=PATIENCE_SECONDS)
    assert found.returncode == code, log.decode()
    if reason is None:
        assert not (shared.parent / "termination-log").exists()
    else:
        message = reported(shared)
        assert (message["version"], message["exitCode"], message["reason"]) == (1, code, reason)
        assert message["message"]


@pytest.mark.parametrize(
    "change",
    [lambda url: url, lambda url: url.replace("digits", "two digits"), lambda url: re.sub(r":(\d+)/", ":port/", url)],
    ids=["refused", "with a blank", "no address"],
)
def test_credentials_reach_neither_log_nor_message(web: Web, shared: Path, change: Callable[[str], str]) -> None:
    web.answer = refusing(403)
    source = change(f"{web.url.replace('//', '//me:c0ffee@')}?X-Amz-Signature=c0ffee")
    with process(shared, {"path": "d", "source": source}, HUB_TOKEN="hf_topsecret") as found:
        _, log = found.communicate(timeout=PATIENCE_SECONDS)
    for text in (log.decode(), json.dumps(reported(shared))):
        assert "c0ffee" not in text
        assert "topsecret" not in text


def test_one_that_is_killed_leaves_nothing_that_the_next_takes_for_data(web: Web, shared: Path) -> None:
    half_sent, go_on = threading.Event(), threading.Event()

    def slow(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(2 * len(BODY)))
        request.end_headers()
        request.wfile.write(BODY)
        half_sent.set()
        go_on.wait(PATIENCE_SECONDS)

    web.answer = slow
    for number in (signal.SIGKILL, signal.SIGTERM):
        half_sent.clear()
        with process(shared, {"path": "digits.bin", "source": web.url}) as found:
            assert half_sent.wait(PATIENCE_SECONDS)
            found.send_signal(number)
            found.communicate(timeout=PATIENCE_SECONDS)
        assert not (shared / "digits.bin").exists()
    assert (found.returncode, reported(shared)["outcome"]) == (143, "Preempted")
    assert left_over(shared) == []
    web.answer = whole
    go_on.set()
    run(Initializer("data", "digits.bin", source=web.url), shared, shared)
    assert (shared / "digits.bin").read_bytes() == BODY
    assert left_over(shared) == []


def test_two_that_ask_for_the_same_at_once_fetch_it_once(web: Web, shared: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def gated(request: http.server.BaseHTTPRequestHandler) -> None:
        asked.set()
        go_on.wait(PATIENCE_SECONDS)
        whole(request)

    web.answer = gated
    task = {"path": "digits.bin", "source": web.url}
    with process(shared, task) as first:
        assert asked.wait(PATIENCE_SECONDS)
        with process(shared, task) as second:
            until_it_waits_for_a_lock(second)
            go_on.set()
            _, log = second.communicate(timeout=PATIENCE_SECONDS)
            first.communicate(timeout=PATIENCE_SECONDS)
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(web.asked) == 1, log.decode()
    assert "waiting for another pod, which prepares digits.bin now" in log.decode()


def until_it_waits_for_a_lock(process: subprocess.Popen[bytes]) -> None:
    """Linux lists those who wait below the one who holds the lock: `7: -> FLOCK  ADVISORY  WRITE 4711 ...`."""
    waits = rf"-> FLOCK +ADVISORY +WRITE {process.pid} "
    eventually(lambda: process.poll() is not None or re.search(waits, Path("/proc/locks").read_text()), "it waits")
    assert process.poll() is None, "it has ended without waiting"
