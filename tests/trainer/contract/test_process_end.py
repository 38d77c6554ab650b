"""A process whose result is settled ends with it, though taking the interpreter apart would abort."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddp_trainer.contract import process_end
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
    ended = subprocess.run([sys.executable, "-m", module, *arguments], env=own, capture_output=True, timeout=120)
    assert ended.returncode == 64, ended.stderr.decode()


def run_rank(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One rank of one, as torchrun starts it; its output goes to a pipe, and is lost unless it is flushed."""
    path = folder / "script.py"
    path.write_text(script)
    own = {
        **{name: value for name, value in os.environ.items() if not name.startswith("DDPJOB_")},
        "PYTHONPATH": str(ROOT / "trainer_image"),
        "DDPJOB_RUN_DIR": str(folder / "run"),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    command = [sys.executable, "-m", "ddp_trainer.rank.worker", "script", str(path)]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=120)


@pytest.mark.processes
def test_a_rank_that_is_done_runs_its_exit_handlers_and_leaves_its_groups(tmp_path: Path) -> None:
    ended = run_rank(SCRIPT, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["a thread was waited for", "exit handlers ran, in a group: True"]


@pytest.mark.parametrize(("last_line", "code"), [("sys.exit(3)", 3), ("raise ValueError('loss is NaN')", 1)])
@pytest.mark.processes
def test_a_rank_that_failed_keeps_its_exit_code(last_line: str, code: int, tmp_path: Path) -> None:
    ended = run_rank(SCRIPT + last_line, tmp_path)
    assert ended.returncode == code, ended.stderr
    assert "exit handlers ran" in ended.stdout


@pytest.mark.processes
def test_a_group_that_cannot_be_destroyed_does_not_keep_a_rank_that_is_done(tmp_path: Path) -> None:
    ended = run_rank(SCRIPT + "dist.destroy_process_group = lambda: time.sleep(600)", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "exit handlers ran" in ended.stdout


def test_an_exit_handler_waits_for_threads_of_gloo_that_still_work() -> None:
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
