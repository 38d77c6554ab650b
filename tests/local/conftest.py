"""Jobs that run on this machine: small, real, and none of their processes outlives its test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.local_run import environment, job_object
from tests.support.waiting import eventually

from ddp_trainer.contract import run_dir

SECONDS = 120.0


@dataclass
class Started:
    """A `ddpjob run` in progress. Its output goes to a file, as in CI."""

    process: subprocess.Popen[bytes]
    output: Path
    shared: Path

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str) -> None:
        """Until the output has `text`."""
        self.until(lambda: text in self.text(), f"{text!r} in the output")

    def until(self, look: Callable[[], object], what: str) -> None:
        """Until `look` is true; fails with all of the output if the run ends or hangs before that."""
        eventually(lambda: self.process.poll() is not None or look(), what, SECONDS, instead=self.text)
        assert look(), f"it ended ({self.process.returncode}): no {what}\n{self.text()}"

    def end(self) -> int:
        """The exit code."""
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {SECONDS} s:\n{self.text()}")

    def descendants(self) -> set[int]:
        """Every process under it, however its session is called."""
        found: list[int] = [self.process.pid]
        children = _children()
        for pid in found:
            found += children.get(pid, [])
        return set(found[1:])

    def pid_of_rank(self, rank: int) -> int:
        """Of the newest attempt of this run; the same job may run beside it, from another checkout."""
        own = self.descendants()
        folders = Path("/dev/shm").glob("ddpjob-*/**/ranks")
        found = [entry for folder in folders for entry in run_dir.registrations(folder.parent) if entry["rank"] == rank]
        (pid,) = (int(entry["pid"]) for entry in found if entry["pid"] in own)
        return pid

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It and every process under it stand still until the end of the block."""
        pids = [self.process.pid, *self.descendants()]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


Run = Callable[..., Started]


@pytest.fixture
def run_job(tmp_path: Path) -> Iterator[Run]:
    """Start `ddpjob run` on a spec, such as `run_job({"nodes": 2}, "--chaos", "…")`, in a folder of its own."""
    started: list[Started] = []

    def start(spec: dict[str, Any], *options: str, name: str = "digits", stdout: int | None = None) -> Started:
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(job_object(name, spec)))
        output = tmp_path / f"output-{len(started)}.txt"
        with output.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "ddpjob_operator.cli.main", "run", str(file), *options],
                cwd=tmp_path,
                env=environment(),
                stdout=out if stdout is None else stdout,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        started.append(Started(process, output, tmp_path / "shared"))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
            run.process.wait()


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    return children
