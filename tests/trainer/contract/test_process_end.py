"""A process whose result is settled ends with it, though taking the interpreter apart would abort."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.contract.one_rank import run_rank

from ddp_trainer.contract import process_end, unfinished
from ddp_trainer.contract.outcomes import read_outcomes
from ddp_trainer.contract.process_end import GLOO_THREADS, await_gloo

ROOT = Path(__file__).parents[3]
PR_SET_NAME = 15
ABORTS = """
import ctypes

# called where C++ destroys its globals, after every exit handler of Python: what gloo's and obstore's threads meet
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)
"""
SCRIPT = f"""{ABORTS}
import atexit, sys, threading, time
import torch.distributed as dist

dist.init_process_group("gloo")
atexit.register(lambda: print("exit handlers ran, in a group:", dist.is_initialized()))

def late():
    time.sleep(0.5)
    print("a thread was waited for")

threading.Thread(target=late).start()
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("ddp_trainer.initialize", []), ("ddp_trainer.train", ["--no-such-flag"])],
)
@pytest.mark.processes
def test_a_refusal_keeps_its_exit_code(module: str, arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABORTS)
    own = {name: value for name, value in os.environ.items() if not name.startswith("DDPJOB_")}
    own["PYTHONPATH"] = f"{tmp_path}:{ROOT / 'trainer_image'}"
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=own, capture_output=True, timeout=PATIENCE_SECONDS
    )
    assert ended.returncode == 64, ended.stderr.decode()


@pytest.mark.processes
def test_a_rank_that_is_done_runs_its_exit_handlers_and_leaves_its_groups(tmp_path: Path) -> None:
    ended = run_rank(SCRIPT, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["a thread was waited for", "exit handlers ran, in a group: True"]


CLOSES = """
import logging, sys
from pathlib import Path

class Tee:
    def __init__(self, stream):
        self.stream, self.file = stream, Path(sys.argv[0]).with_name("log.txt").open("w")

    def write(self, text):
        self.file.write(text)
        self.stream.write(text)

    def flush(self):
        self.file.flush()

"""


@pytest.mark.parametrize(
    "last_lines",
    [
        "sys.stdout.close(); sys.stderr.close()",
        "sys.stdout = sys.stderr = None",
        "sys.stdout = sys.stderr = Tee(sys.stderr); sys.stderr.file.close()",
    ],
)
@pytest.mark.processes
def test_a_script_that_closes_its_streams_is_judged_by_what_it_did(last_lines: str, tmp_path: Path) -> None:
    ended = run_rank(CLOSES + last_lines, tmp_path)
    assert ended.returncode == 0, ended.stderr
    (outcome,) = read_outcomes(tmp_path / "run")
    assert outcome["reason"] == "Completed"
    ended = run_rank(f"{CLOSES}{last_lines}\nraise ValueError('loss is NaN')", tmp_path)
    assert ended.returncode == 1
    assert "ValueError: loss is NaN" in ended.stderr


@pytest.mark.parametrize(("last_line", "code"), [("sys.exit(3)", 3), ("raise ValueError('loss is NaN')", 1)])
@pytest.mark.processes
def test_a_rank_that_failed_keeps_its_exit_code(last_line: str, code: int, tmp_path: Path) -> None:
    # on a busy machine its exit handlers may be idle for longer than it leaves them
    patient = "from ddp_trainer.contract import unfinished\nunfinished.FAILED_SECONDS = 100.0\n"
    ended = run_rank(f"{patient}{SCRIPT}{last_line}", tmp_path)
    assert ended.returncode == code, ended.stderr
    assert "exit handlers ran" in ended.stdout
    assert "has failed" not in ended.stderr


FAILS = """
import atexit, os, sys, threading, time
from ddp_trainer.contract import unfinished

unfinished.FAILED_SECONDS = FAILED

def uploads(seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(0.01)
        with open(f"{sys.argv[0]}.part", "ab") as part:
            part.write(b"part")
    print("uploaded", flush=True)

"""


@pytest.mark.parametrize(
    ("handler", "failed", "limit", "uploaded", "words"),
    [
        ("uploads, 8.0", 4.0, 60, True, "what it left at work may go on for 5"),
        ("uploads, 1000", 4.0, 5, False, "cutting its exit handlers and threads (MainThread), still at work "),
        ("time.sleep, 1000", 0.5, 60, False, "cutting its exit handlers and threads (MainThread), idle "),
    ],
    ids=["works", "works for too long", "waits"],
)
@pytest.mark.processes
def test_what_a_failed_script_left_at_work_may_go_on_and_what_is_cut_is_named(
    handler: str, failed: float, limit: int, uploaded: bool, words: str, tmp_path: Path
) -> None:
    script = FAILS.replace("= FAILED", f"= {failed}")
    ended = run_rank(
        f"{script}\natexit.register({handler})\nraise ValueError('loss is NaN')", tmp_path,
        DDPJOB_SHUTDOWN_SECONDS=str(limit),
    )  # fmt: skip
    assert (ended.returncode, "uploaded" in ended.stdout) == (1, uploaded), ended.stderr
    assert f"ddp_trainer: the script has failed; {words}" in ended.stderr
    assert ("cutting" in ended.stderr) != uploaded


@pytest.mark.processes
def test_a_failed_script_that_lets_no_other_thread_run_is_ended_by_the_kernel(tmp_path: Path) -> None:
    holds = "import ctypes; atexit.register(ctypes.PyDLL(None).sleep, 1000)"
    ended = run_rank(f"{FAILS.replace('= FAILED', '= 0.5')}\n{holds}\nraise ValueError('loss is NaN')", tmp_path)
    assert ended.returncode == -signal.SIGALRM, ended.stderr
    (outcome,) = read_outcomes(tmp_path / "run")
    assert outcome["exitCode"] == 1


@pytest.mark.processes
def test_a_group_that_cannot_be_destroyed_does_not_keep_a_rank_that_is_done(tmp_path: Path) -> None:
    ended = run_rank(SCRIPT + "dist.destroy_process_group = lambda: time.sleep(600)", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "exit handlers ran" in ended.stdout


HELPERS = """
import multiprocessing, os, sys, time
from pathlib import Path
from ddp_trainer.contract import unfinished

unfinished.HELPER_SECONDS = 0.4
unfinished.SAY_SECONDS = 0.5
context = multiprocessing.get_context("fork")

def upload(seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        sum(range(100_000))
    Path(sys.argv[0]).with_name("uploaded").touch()

def serve():
    time.sleep(1000)

"""


@pytest.mark.processes
def test_a_process_that_works_is_waited_for_and_one_that_only_waits_is_ended(tmp_path: Path) -> None:
    script = """
unfinished.HELPER_SECONDS = 3.0  # a busy machine lets a process wait that would work
unfinished.SAY_SECONDS = 4.0
context.Process(target=upload, args=(6.0,), name="upload").start()
context.Process(target=serve, name="server").start()
"""
    ended = run_rank(HELPERS + script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "uploaded").exists()
    assert "the script is done; waiting for processes that it started: upload (" in ended.stderr
    assert "the script is done; ended the processes that it left: server (" in ended.stderr
    assert "upload" not in ended.stderr.split("ended the processes")[1]
    assert read_outcomes(tmp_path / "run")[0]["cut"] is None


@pytest.mark.processes
def test_work_that_is_cut_off_after_a_success_is_on_record(tmp_path: Path) -> None:
    script = """
unfinished.HELPER_SECONDS = 30.0  # a busy machine lets a process wait that would work
unfinished.WORK_SECONDS = 0.3
context.Process(target=upload, args=(1000,), name="upload").start()
"""
    ended = run_rank(HELPERS + script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    (outcome,) = read_outcomes(tmp_path / "run")
    assert outcome["reason"] == "Completed"
    assert re.fullmatch(r"its processes upload \(\d+\), still at work 0.3 s after the script", outcome["cut"])


@pytest.mark.processes
@pytest.mark.parametrize("change", ["os.environ.pop('DDPJOB_RUN_DIR')", "os.environ['RANK'] = '3'"])
def test_what_a_script_does_to_its_environment_does_not_keep_its_process(tmp_path: Path, change: str) -> None:
    script = f"""
import os, threading, time
from ddp_trainer.contract import unfinished
unfinished.END_SECONDS = 0.3
threading.Thread(target=time.sleep, args=(1000,), name="sleeps").start()
{change}
"""
    ended = run_rank(script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    (outcome,) = read_outcomes(tmp_path / "run")
    assert outcome["cut"].endswith("with the threads MainThread, sleeps")


def test_a_process_outlasts_the_helpers_that_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would leave them: both were given the same time, and a process on a busy machine was the first to go."""
    monkeypatch.setattr(unfinished, "WORK_SECONDS", 0.0)
    of_helper = unfinished.Patience(unfinished.used_here, unfinished.HELPER_SECONDS)
    assert (of_helper.goes_on(), unfinished.of_this_process().goes_on()) == (False, True)


LOOKS = """
import sys, time
from ddp_trainer.contract import unfinished
from ddp_trainer.contract.processes import is_active

before, began = unfinished.used_here(), time.thread_time()
while time.thread_time() < began + 0.3:
    open("file", "rb").read()
sys.exit("it counts" if is_active(before, unfinished.used_here(), 10.0) else 0)
"""


@pytest.mark.processes
def test_what_looks_at_this_process_does_not_count_as_its_work(tmp_path: Path) -> None:
    """In a process of its own: below this one is the server of forked processes, which other workers use too."""
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    looked = subprocess.run(
        [sys.executable, "-c", LOOKS],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "trainer_image")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert looked.returncode == 0, looked.stderr


def test_an_exit_handler_waits_for_threads_of_gloo_that_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_end, "LEAVE_SECONDS", PATIENCE_SECONDS)  # a busy machine may give them no processor
    begun, done, over = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, GLOO_THREADS.encode(), 0, 0, 0)
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000)  # in C, as a collective; some tenths of a second
        done.set()
        over.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    await_gloo()
    assert done.is_set()
    over.set()
    thread.join()


def test_a_thread_of_gloo_that_never_rests_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_end, "LEAVE_SECONDS", 0.05)
    monkeypatch.setattr(process_end, "_thread_states", lambda name: iter("SR"))
    await_gloo()
