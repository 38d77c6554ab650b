"""Data on the volume: whole or not at all, checked, once, and by nobody else's leave.

Real sources: a web server on this machine, mounted folders, scripts; object stores and hubs are in test_sources.py.
"""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_trainer.errors import UserError
from ddp_trainer.initialize import Task, run
from ddp_trainer.json_files import read_json
from ddp_trainer.sources import FetchError, shown

BODY = b"0123456789" * 1000
DIGEST = hashlib.sha256(BODY).hexdigest()


class Web:
    """A web server that counts what it is asked for; `answer` may be replaced."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer: Callable[[http.server.BaseHTTPRequestHandler], None] = whole
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append(self.path)
                web.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/digits.bin"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def whole(request: http.server.BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(BODY)))
    request.end_headers()
    request.wfile.write(BODY)


def cut_short(request: http.server.BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(2 * len(BODY)))
    request.end_headers()
    request.wfile.write(BODY)


def refusing(code: int) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    return lambda request: request.send_error(code)


@pytest.fixture
def web() -> Iterator[Web]:
    found = Web()
    yield found
    found.close()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def claims(shared: Path) -> Path:
    """Where claims are mounted: one named `models`, with a folder of two files."""
    folder = shared.parent / "source" / "models" / "tiny"
    (folder / "weights").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "weights" / "0.bin").write_bytes(BODY)
    return shared.parent / "source"


def ends(pid: int) -> bool:
    """Whether a process that was killed is gone, or waits to be collected, within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def left_over(shared: Path) -> list[str]:
    """Temporary names that are still on the volume."""
    return [str(path) for path in shared.rglob(".*") if path.name.endswith((".part", ".old"))]


def test_a_file_is_there_after_it_was_fetched_and_is_not_fetched_again(web: Web, shared: Path) -> None:
    task = Task("dataset", "datasets/digits.bin", source=web.url, sha256=DIGEST)
    for _ in range(2):
        run(task, shared, shared)
        assert (shared / "datasets" / "digits.bin").read_bytes() == BODY
    assert len(web.asked) == 1
    assert left_over(shared) == []
    (marker,) = (shared / ".ddpjob" / "initialized").glob("*.json")
    assert marker.stem == task.digest
    known = read_json(marker)
    assert known is not None
    assert (known["version"], known["path"], known["files"], known["bytes"]) == (1, task.path, 1, len(BODY))


def test_another_job_that_asks_for_the_same_under_another_name_finds_it(web: Web, shared: Path) -> None:
    for name in ("dataset", "training-data"):
        run(Task(name, "datasets/digits.bin", source=web.url), shared, shared)
    assert len(web.asked) == 1


@pytest.mark.parametrize("change", ["sha256", "path", "source"])
def test_another_task_is_done_although_one_like_it_was(web: Web, shared: Path, change: str) -> None:
    first = {"name": "a", "path": "datasets/digits.bin", "source": web.url}
    other = {"sha256": DIGEST, "path": "datasets/other.bin", "source": f"{web.url}?v=2"}
    run(Task(**first), shared, shared)
    run(Task(**first | {change: other[change]}), shared, shared)
    assert len(web.asked) == 2


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(BODY[1:])])
def test_what_is_no_longer_what_was_put_there_is_fetched_again(
    web: Web, shared: Path, damage: Callable[[Path], None]
) -> None:
    task = Task("dataset", "digits.bin", source=web.url)
    run(task, shared, shared)
    damage(shared / "digits.bin")
    run(task, shared, shared)
    assert (shared / "digits.bin").read_bytes() == BODY


def test_a_file_with_another_checksum_never_gets_its_name(web: Web, shared: Path) -> None:
    task = Task("dataset", "digits.bin", source=web.url, sha256="0" * 64)
    with pytest.raises(FetchError, match=f"has the SHA-256 {DIGEST} and not 000"):
        run(task, shared, shared)
    assert not (shared / "digits.bin").exists()
    assert left_over(shared) == []
    assert list(shared.rglob("*.json")) == []


def test_a_connection_that_breaks_is_not_taken_for_the_end(web: Web, shared: Path) -> None:
    web.answer = cut_short
    with pytest.raises(FetchError, match=f"{len(BODY)} bytes came of {2 * len(BODY)}"):
        run(Task("dataset", "digits.bin", source=web.url), shared, shared)
    assert not (shared / "digits.bin").exists()


def test_what_was_there_stays_until_what_replaces_it_is_whole(web: Web, shared: Path) -> None:
    (shared / "digits.bin").write_text("before")
    web.answer = cut_short
    task = Task("dataset", "digits.bin", source=web.url)
    with pytest.raises(FetchError):
        run(task, shared, shared)
    assert (shared / "digits.bin").read_text() == "before"
    web.answer = whole
    run(task, shared, shared)
    assert (shared / "digits.bin").read_bytes() == BODY


@pytest.mark.parametrize(
    ("code", "kind"), [(404, UserError), (403, UserError), (500, FetchError), (503, FetchError), (429, FetchError)]
)
def test_an_answer_tells_whether_to_ask_again(web: Web, shared: Path, code: int, kind: type[Exception]) -> None:
    web.answer = refusing(code)
    with pytest.raises(kind, match=f"answered {code}"):
        run(Task("dataset", "digits.bin", source=web.url), shared, shared)


def test_a_server_that_is_not_there_may_be_later(web: Web, shared: Path) -> None:
    web.close()
    with pytest.raises(FetchError, match="Connection refused"):
        run(Task("dataset", "digits.bin", source=web.url), shared, shared)


def test_a_folder_of_a_mounted_claim_is_copied_as_it_is(shared: Path) -> None:
    mounted = claims(shared)
    run(Task("model", "models/tiny", source="pvc://models/tiny"), shared, mounted)
    assert (shared / "models" / "tiny" / "config.json").read_text() == "{}"
    assert (shared / "models" / "tiny" / "weights" / "0.bin").read_bytes() == BODY
    (mounted / "models" / "tiny" / "config.json").unlink()
    run(Task("model", "models/tiny", source="pvc://models/tiny"), shared, mounted)
    assert (shared / "models" / "tiny" / "config.json").exists(), "the second time there was nothing to do"


def test_a_folder_that_cannot_be_read_in_part_is_not_taken_for_whole(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted, scan = claims(shared), os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("weights"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match="may not be read"):
        run(Task("model", "models/tiny", source="pvc://models/tiny"), shared, mounted)
    assert not (shared / "models" / "tiny").exists()


def test_a_folder_replaces_a_folder_whole(shared: Path) -> None:
    mounted = claims(shared)
    (shared / "models" / "tiny").mkdir(parents=True)
    (shared / "models" / "tiny" / "stale.bin").write_text("x")
    run(Task("model", "models/tiny", source="pvc://models/tiny"), shared, mounted)
    assert sorted(path.name for path in (shared / "models" / "tiny").iterdir()) == ["config.json", "weights"]
    assert left_over(shared) == []


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ({"source": "pvc://models/none"}, "there is no pvc://models/none"),
        ({"source": "pvc://models/tiny", "sha256": DIGEST}, "is a folder"),
        ({"source": "http:///x"}, "names no host"),
        ({"script": "true"}, "the script has ended, and there is no data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_never_work_as_written_is_the_users_to_correct(shared: Path, task: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        run(Task("x", "data", **task), shared, claims(shared))


def test_a_script_runs_on_the_volume_once(shared: Path) -> None:
    task = Task("unpack", "datasets/count", script="mkdir -p datasets && pwd >> datasets/count")
    for _ in range(2):
        run(task, shared, shared)
    assert (shared / "datasets" / "count").read_text() == f"{shared}\n"


def test_a_script_that_fails_is_tried_again_and_leaves_nothing_running(shared: Path) -> None:
    task = Task("unpack", "done", script="sleep 600 & echo $! > pid; test -e ready && touch done")
    with pytest.raises(FetchError, match="exit code 1"):
        run(task, shared, shared)
    assert ends(int((shared / "pid").read_text()))
    (shared / "ready").touch()
    run(task, shared, shared)


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("https://me:pass@host/a?X-Signature=abc failed", "https://***@host/a?*** failed"),
        ("url='https://host/a?token=abc'", "url='https://host/a?***'"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("no address here?", "no address here?"),
    ],
)
def test_what_is_secret_in_an_address_is_not_shown(text: str, public: str) -> None:
    assert shown(text) == public


def test_a_driver_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe({"/bucket/ok.bin": BODY, "/bucket/../evil": b"x"})
    files.find = lambda root, detail: {"/bucket/../evil": {"size": 1}}
    from ddp_trainer.sources import copy_tree

    with pytest.raises(FetchError, match="is not inside"):
        copy_tree(files, "/bucket", tmp_path / "data", "memory://bucket")
    assert not (tmp_path / "evil").exists()


# The process, as a pod runs it.


def process(shared: Path, task: dict[str, Any] | str, **environ: str) -> subprocess.Popen[bytes]:
    given = {
        "DDPJOB_INITIALIZER": task if isinstance(task, str) else json.dumps({"name": "data", **task}),
        "DDPJOB_SHARED": str(shared),
        "DDPJOB_TERMINATION_LOG": str(shared.parent / "termination-log"),
    }
    command = [sys.executable, "-m", "ddp_trainer.initialize"]
    given["PYTHONPATH"] = str(Path(__file__).parents[2] / "trainer_image")
    return subprocess.Popen(command, env={**os.environ, **given, **environ}, stderr=subprocess.PIPE)


def told(shared: Path) -> dict[str, Any]:
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
        ("nonsense", 64, "UserError"),
    ],
    ids=["done", "a wrong checksum", "out of the volume", "out of it by a link", "below a file", "no task"],
)
def test_the_exit_code_says_what_to_do_and_the_message_why(
    web: Web, shared: Path, task: dict[str, Any] | str, code: int, reason: str | None
) -> None:
    (shared / "link").symlink_to(shared.parent)
    (shared / "file").touch()
    given = task if isinstance(task, str) else {**task, "source": web.url}
    with process(shared, given) as found:
        _, log = found.communicate(timeout=60)
    assert found.returncode == code, log.decode()
    if reason is None:
        assert not (shared.parent / "termination-log").exists()
    else:
        message = told(shared)
        assert (message["version"], message["exitCode"], message["reason"]) == (1, code, reason)
        assert message["message"]


def test_credentials_reach_neither_log_nor_message(web: Web, shared: Path) -> None:
    web.answer = refusing(403)
    source = f"{web.url}?X-Amz-Signature=c0ffee"
    with process(shared, {"path": "d", "source": source}, HUB_TOKEN="hf_topsecret") as found:
        _, log = found.communicate(timeout=60)
    for text in (log.decode(), json.dumps(told(shared))):
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
        go_on.wait(60)

    web.answer = slow
    for number in (signal.SIGKILL, signal.SIGTERM):
        half_sent.clear()
        with process(shared, {"path": "digits.bin", "source": web.url}) as found:
            assert half_sent.wait(60)
            found.send_signal(number)
            found.communicate(timeout=60)
        assert not (shared / "digits.bin").exists()
    assert (found.returncode, told(shared)["outcome"]) == (143, "Preempted")
    assert left_over(shared) == []
    web.answer = whole
    go_on.set()
    run(Task("data", "digits.bin", source=web.url), shared, shared)
    assert (shared / "digits.bin").read_bytes() == BODY
    assert left_over(shared) == []


def test_two_that_ask_for_the_same_at_once_fetch_it_once(web: Web, shared: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def gated(request: http.server.BaseHTTPRequestHandler) -> None:
        asked.set()
        go_on.wait(60)
        whole(request)

    web.answer = gated
    task = {"path": "digits.bin", "source": web.url}
    with process(shared, task) as first:
        assert asked.wait(60)
        with process(shared, task) as second:
            until_it_waits_for_a_lock(second)
            go_on.set()
            _, log = second.communicate(timeout=60)
            first.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(web.asked) == 1, log.decode()


def until_it_waits_for_a_lock(process: subprocess.Popen[bytes]) -> None:
    """Linux lists those who wait below the one who holds the lock: `7: -> FLOCK  ADVISORY  WRITE 4711 ...`."""
    deadline = time.monotonic() + 60
    while not re.search(rf"-> FLOCK +ADVISORY +WRITE {process.pid} ", Path("/proc/locks").read_text()):
        assert process.poll() is None, "it has ended without waiting"
        assert time.monotonic() < deadline, "it does not wait"
        time.sleep(0.02)
