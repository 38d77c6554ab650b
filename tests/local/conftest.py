"""Jobs that run on this machine: small, real, and none of their processes outlives its test."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support import forked_run
from tests.support.command import COMMAND
from tests.support.local_run import PACKAGES, environment, job_object
from tests.support.waiting import PATIENCE_SECONDS, eventually
from tests.trainer.forked.start import Forked, stop

from ddp_trainer.contract import run_dir

HERE = Path(__file__).parent
PACED = HERE.parent / "trainer" / "launch"


def held(at: int, epochs: int) -> dict[str, Any]:
    """Of the spec of a job that trains digits, and stands still after `at` steps of each attempt until `let_go`."""
    return {
        "args": ["--task", "held_tasks:Held", "--task-options", f"at={at}", "--epochs", str(epochs)],
        "env": [{"name": "PYTHONPATH", "value": os.pathsep.join(map(str, (*PACKAGES, HERE)))}],
        "stall": {"minSeconds": 300},  # it stands still for as long as the test needs
    }


def paced(epochs: int) -> dict[str, Any]:
    """Of the spec of a job that trains digits for as long as a test looks at it, and leaves the processor to others."""
    options = ("--task-options", "seconds=0.03", "--task-options", "last=1000")
    return {
        "args": ["--task", "paced_tasks:Paced", *options, "--epochs", str(epochs)],
        "env": [{"name": "PYTHONPATH", "value": os.pathsep.join(map(str, (*PACKAGES, PACED)))}],
    }


def let_go(shared: Path, attempt: int = 0) -> None:
    """Let an attempt go on that stands still, or that will."""
    (shared / f"go-{attempt}").touch()


@dataclass
class Started:
    """A `ddpjob run` in progress. Its output goes to a file, as in CI."""

    process: subprocess.Popen[bytes] | Forked
    output: Path
    shared: Path

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str) -> None:
        """Until the output has `text`."""
        self.until(lambda: text in self.text(), f"{text!r} in the output")

    def until(self, look: Callable[[], object], what: str) -> None:
        """Until `look` is true; fails with all of the output if the run ends or hangs before that."""

        def seen() -> object:
            over = self.process.poll() is not None
            found = look()  # once: what is true of a run now may be so no more a moment later
            assert found or not over, f"it ended ({self.process.returncode}): no {what}\n{self.text()}"
            return found

        eventually(seen, what, instead=self.text)

    def end(self) -> int:
        """The exit code."""
        try:
            return self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {PATIENCE_SECONDS} s:\n{self.text()}")

    def descendants(self) -> set[int]:
        """Every process under it, however its session is called."""
        found: list[int] = [self.process.pid]
        children = _children()
        for pid in found:
            found += children.get(pid, [])
        return set(found[1:])

    def scratch(self) -> set[Path]:
        """The scratch folders of its pods whose ranks run now; those of another run of the job, beside it, are not its,
        and come and go meanwhile.
        """
        own, found = self.descendants(), set()
        for folder in Path("/dev/shm").glob("ddpjob-*"):
            with suppress(OSError):
                if any(entry["pid"] in own for entry in run_dir.registrations(folder / "run")):
                    found.add(folder)
        return found

    def pid_of_rank(self, rank: int) -> int:
        """Of a rank that runs now."""
        own = self.descendants()
        found = [entry for folder in self.scratch() for entry in run_dir.registrations(folder / "run")]
        (pid,) = (int(entry["pid"]) for entry in found if entry["rank"] == rank and entry["pid"] in own)
        return pid


Run = Callable[..., Started]


@pytest.fixture
def run_job(tmp_path: Path) -> Iterator[Run]:
    """Start `ddpjob run` on a spec, such as `run_job({"nodes": 2}, "--chaos", "…")`, in a folder of its own; processes
    are new ones if `fresh`, else forked.
    """
    started: list[Started] = []

    def start(
        spec: dict[str, Any], *options: str, name: str = "digits", stdout: int | None = None, fresh: bool = False
    ) -> Started:
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(job_object(name, spec)))
        output = tmp_path / f"output-{len(started)}.txt"
        with output.open("wb") as out:
            to = out.fileno() if stdout is None else stdout
            process = begin(fresh, [str(file), *options], tmp_path, to)
        started.append(Started(process, output, tmp_path / "shared"))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
            run.process.wait()


def begin(fresh: bool, arguments: list[str], folder: Path, output: int) -> subprocess.Popen[bytes] | Forked:
    if not fresh:
        return forked_run.start(arguments, folder, output)
    return subprocess.Popen(
        [*COMMAND, "run", *arguments],
        cwd=folder,
        env=environment(),
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )


def pytest_sessionfinish() -> None:
    stop()


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    return children
