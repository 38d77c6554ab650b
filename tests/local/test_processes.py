"""A pod on this machine ends as a container does: with its first process, and without leaving anything."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.tmpfs import small_tmpfs
from tests.support.waiting import PATIENCE_SECONDS

from ddpjob_operator.core.values.observed import PodPhase
from ddpjob_operator.local import container
from ddpjob_operator.local.environment import Command, Endpoints
from ddpjob_operator.local.processes import LocalPod, make_scratch

pytestmark = pytest.mark.local

ORPHANS = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
child = subprocess.Popen(sleep, start_new_session=True)
middle = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True).pid)"
subprocess.run([sys.executable, "-c", middle, *sleep])
print("ready", child.pid, flush=True)
"""
"""Leaves a child in a session of its own, and an orphan whose parent has ended (it prints its pid)."""

StartPod = Callable[..., Awaitable[LocalPod]]


@pytest.fixture
async def start_pod(tmp_path: Path) -> AsyncIterator[StartPod]:
    """Start a pod that runs a piece of Python."""
    pods: list[LocalPod] = []

    async def start(code: str, grace_seconds: float = 30.0) -> LocalPod:
        scratch = make_scratch("test")
        pod = LocalPod(
            name="job-0-0",
            uid="u",
            attempt=0,
            node_rank=0,
            host="here",
            endpoints=Endpoints(1, 2, scratch),
            log=tmp_path / "logs" / "job-0-0.log",
            grace_seconds=grace_seconds,
            changed=lambda: None,
        )
        pods.append(pod)
        env = {"PATH": os.environ["PATH"], "TERMINATION": str(pod.endpoints.termination_log)}
        await pod.start(Command((sys.executable, "-c", code), env))
        return pod

    yield start
    for pod in pods:
        pod.kill()
        await pod.wait()
        pod.remove()


async def output(pod: LocalPod, until: str) -> str:
    """The pod's log once it has `until`."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while until not in pod.log.read_text():
            assert not pod.ended, pod.log.read_text()
            await asyncio.sleep(0.01)
    return pod.log.read_text()


async def ended(pod: LocalPod) -> LocalPod:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await pod.wait()
    return pod


def fill(path: Path) -> None:
    """Use up the file system, to the last byte."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass


async def happens(condition: Callable[[], bool], pod: LocalPod) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            assert not pod.ended, pod.termination
            await asyncio.sleep(0.01)


def pids_in(log: str) -> list[int]:
    return [int(word) for line in log.splitlines()[1:] for word in line.split() if word.isdigit()]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_exit_code_and_message_are_what_a_kubelet_would_report(start_pod: StartPod) -> None:
    code = "import os, sys; open(os.environ['TERMINATION'], 'w').write('why'); sys.exit(64)"
    view = (await ended(await start_pod(code))).view()
    assert view.phase is PodPhase.FAILED
    assert view.termination is not None
    assert (view.termination.exit_code, view.termination.message) == (64, "why")


async def test_a_pod_that_exits_with_0_has_succeeded(start_pod: StartPod) -> None:
    assert (await ended(await start_pod("pass"))).view().phase is PodPhase.SUCCEEDED


async def test_a_command_killed_by_a_signal_exits_with_128_plus_it(start_pod: StartPod) -> None:
    pod = await ended(await start_pod("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert pod.termination is not None
    assert pod.termination.exit_code == 137


async def test_a_command_that_is_not_there_is_named_in_the_log(start_pod: StartPod, tmp_path: Path) -> None:
    pod = await start_pod("pass")
    await ended(pod)
    other = LocalPod("other-0-0", "v", 0, 0, "here", pod.endpoints, tmp_path / "other.log", 1.0, lambda: None)
    await other.start(Command(("/nowhere/python",), {}))
    await ended(other)
    assert other.termination is not None
    assert other.termination.exit_code == 127
    assert "cannot start '/nowhere/python': No such file or directory" in other.log.read_text()


async def test_what_no_process_can_be_given_is_an_error_and_not_a_hang(start_pod: StartPod) -> None:
    with pytest.raises(ValueError, match="null byte"):
        await start_pod("pass\0")


async def test_a_full_disk_does_not_end_what_prints(start_pod: StartPod, tmp_path: Path) -> None:
    """Its lines wait until there is room again, the header of the log too."""
    with small_tmpfs(tmp_path / "logs", "64k"):
        filler = tmp_path / "logs" / "filler"
        fill(filler)
        pod = await start_pod(
            "import pathlib, time\n"
            "print(*range(1000), sep='\\n', flush=True)\n"
            f"pathlib.Path({str(tmp_path / 'printed')!r}).touch()\n"
            f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\n"
            "print('end')"
        )
        await happens((tmp_path / "printed").exists, pod)
        filler.unlink()
        (tmp_path / "go").touch()
        await ended(pod)
        header, *lines = pod.log.read_text().splitlines()
    assert pod.view().phase is PodPhase.SUCCEEDED
    assert header.endswith("job-0-0 (u) starts")
    assert lines == [*map(str, range(1000)), "end"]


async def test_what_a_full_disk_takes_too_late_is_counted(start_pod: StartPod, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "logs", "4m"):
        filler = tmp_path / "logs" / "filler"
        fill(filler)
        pod = await start_pod(
            "import pathlib, time\n"
            "for number in range(200_000): print(f'{number:9}')\n"
            f"pathlib.Path({str(tmp_path / 'printed')!r}).touch()\n"
            f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\n"
        )
        await happens((tmp_path / "printed").exists, pod)
        filler.unlink()
        (tmp_path / "go").touch()
        await ended(pod)
        text = pod.log.read_text()
    note, *lines = text.splitlines()
    left_out = re.fullmatch(r"ddpjob: (\d+) bytes are not here: the disk was full", note)
    assert left_out is not None
    assert lines == [f"{number:9}" for number in range(200_000)][-len(lines) :]
    assert len(lines) < 150_000
    assert int(left_out[1]) + len(lines) * 10 == 2_000_000 + len("---- 2030-01-01T00:00:00Z job-0-0 (u) starts\n")


async def test_nothing_outlives_the_first_process(start_pod: StartPod) -> None:
    pod = await ended(await start_pod(ORPHANS))
    pids = pids_in(pod.log.read_text())
    assert len(pids) == 2
    assert alive(pids) == []


async def test_a_kill_reaches_every_session_and_every_orphan(start_pod: StartPod) -> None:
    pod = await start_pod(ORPHANS + "time.sleep(1000)")
    pids = pids_in(await output(pod, "ready"))
    assert len(alive(pids)) == 2
    pod.kill()
    await ended(pod)
    assert alive(pids) == []
    assert pod.termination is not None
    assert pod.termination.exit_code == 137


async def test_sigterm_reaches_the_command_alone(start_pod: StartPod) -> None:
    pod = await start_pod(
        "import signal, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(1000)'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143 if child.poll() is None else 1))\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)"
    )
    await output(pod, "ready")
    pod.terminate()
    await ended(pod)
    assert pod.termination is not None
    assert pod.termination.exit_code == 143


async def test_what_ignores_sigterm_is_killed_after_the_grace(start_pod: StartPod) -> None:
    pod = await start_pod(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1000)",
        grace_seconds=0.3,
    )
    await output(pod, "ready")
    assert pod.pid is not None
    os.kill(pod.pid, signal.SIGTERM)
    await output(pod, "no")
    began = time.monotonic()
    pod.terminate()
    await ended(pod)
    assert time.monotonic() - began >= 0.3
    assert pod.termination is not None
    assert pod.termination.exit_code == 137


async def test_a_stopped_process_is_killed_all_the_same(start_pod: StartPod) -> None:
    pod = await start_pod("import os, signal\nprint('ready', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)")
    await output(pod, "ready")
    pod.kill()
    await ended(pod)


async def test_logs_of_two_attempts_follow_each_other(start_pod: StartPod) -> None:
    await ended(await start_pod("print('first attempt')"))
    pod = await ended(await start_pod("print('second attempt')"))
    lines = pod.log.read_text().splitlines()
    assert [line for line in lines if not line.startswith("----")] == ["first attempt", "second attempt"]
    assert len(lines) == 4


def test_when_the_runner_is_killed_its_pods_and_their_scratch_are_gone(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    runner = (
        "import os, subprocess, sys, time\n"
        "given, held = os.pipe()\n"
        "subprocess.Popen(sys.argv[1:], stdin=given)\n"
        "os.close(given)\n"
        "time.sleep(1000)"
    )
    pod = [sys.executable, "-I", "-S", container.__file__, str(scratch), "header"]
    command = [sys.executable, "-c", ORPHANS + "time.sleep(1000)"]
    with subprocess.Popen([sys.executable, "-c", runner, *pod, *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = pids_in("".join(process.stdout.readline() for _ in range(3)))
        assert len(alive(pids)) == 2
        process.send_signal(signal.SIGKILL)
        process.stdout.read()  # ends when the last process that writes there has ended
        assert alive(pids) == []
        assert not scratch.exists()
