"""Whether the processes of a rank do anything, asked of real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tests.support.starting import starts_processes
from tests.support.waiting import PATIENCE_SECONDS

from ddp_trainer.contract.processes import Usage, is_active, usage
from ddp_trainer.launch.activity import Activity

IDLE = Usage(cpu_seconds=100.0, io_bytes=10**9, written=10**6)


@pytest.mark.parametrize(
    ("after", "active"),
    [
        (IDLE, False),
        (Usage(100.05, 10**9, 10**6), False),
        (Usage(100.2, 10**9, 10**6), True),
        (Usage(100.0, 10**9 + 4096, 10**6), False),
        (Usage(100.0, 10**9 + 10**5, 10**6), True),
        (Usage(100.0, 10**9 + 2, 10**6 + 2), True),
    ],
    ids=["nothing", "idle threads", "computes", "a child's log", "a download", "a line of output"],
)
def test_a_rank_is_active_if_it_computes_reads_or_writes(after: Usage, active: bool) -> None:
    assert is_active(IDLE, after, seconds=5.0) == active


def test_what_the_kernel_rounds_is_no_activity_however_fast_looks_follow_each_other() -> None:
    assert not is_active(IDLE, Usage(100.019, 10**9, 10**6), seconds=0.125)
    assert is_active(IDLE, Usage(100.03, 10**9, 10**6), seconds=0.125)


@pytest.fixture
@starts_processes
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as cat:
        yield cat
        cat.kill()


def test_an_idle_process_is_inactive_since_the_first_look_and_active_again_when_it_writes(
    process: subprocess.Popen[str],
) -> None:
    activity = Activity(allowance=60.0)
    assert activity.by_pid([process.pid], 1000.0) == {process.pid: 1000.0}
    assert activity.by_pid([process.pid], 1004.0) == {process.pid: 1004.0}, "not looked at again yet"
    assert activity.by_pid([process.pid], 1010.0) == {process.pid: 1000.0}
    written = usage(process.pid).written
    assert process.stdin is not None
    process.stdin.write("a line\n")
    process.stdin.flush()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while usage(process.pid).written == written and time.monotonic() < deadline:
        time.sleep(0.01)
    assert activity.by_pid([process.pid], 1020.0) == {process.pid: 1020.0}


@pytest.mark.processes
def test_the_usage_of_a_process_includes_its_children() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7))']); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while usage(parent.pid).cpu_seconds < 0.1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert usage(parent.pid).cpu_seconds >= 0.1
        parent.kill()
    assert usage(parent.pid) == Usage(0.0, 0, 0)
