"""SIGTERM in the middle of `torch.save`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from tests.trainer.contract.one_rank import run_rank

SAVES = """
import os, signal, sys, threading
import torch

class Signals:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))  # Python runs handlers between two of its instructions
        return int, ()

def handler(number, frame):
    print("handler:", signal.getsignal(signal.SIGTERM) is handler, flush=True)
    sys.exit(3)

def save(*_):
    torch.save({"first": torch.ones(3), "signals": Signals(), "last": torch.ones(3)}, PATH)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("lines", "code", "printed"),
    [
        ("save()", -signal.SIGTERM, ""),
        ("signal.signal(signal.SIGTERM, handler); save()", 3, "handler: True\n"),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); save(); print('after')", 0, "after\n"),
        ("torch.save(torch.ones(1), PATH); save()", -signal.SIGTERM, ""),
    ],
    ids=["default action", "handler of the script", "ignored", "a second save"],
)
def test_a_file_is_whole_where_sigterm_comes_while_it_is_written(
    lines: str, code: int, printed: str, tmp_path: Path
) -> None:
    path = tmp_path / "snapshot.pt"
    ended = run_rank(f"PATH = {str(path)!r}\n{SAVES}\n{lines}\nprint('end')", tmp_path)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.removesuffix("end\n") == printed
    assert torch.equal(torch.load(path, weights_only=False)["last"], torch.ones(3))


@pytest.mark.processes
def test_a_save_on_another_thread_is_that_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    lines = "thread = threading.Thread(target=torch.save, args=[torch.ones(3), PATH]); thread.start(); thread.join()"
    ended = run_rank(f"PATH = {str(path)!r}\n{SAVES}\n{lines}", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert torch.equal(torch.load(path), torch.ones(3))
