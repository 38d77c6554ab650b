"""A whole `ddpjob run`, with the CLI, the launchers, torchrun and the ranks, for programs that measure it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ddp_trainer.contract import processes

ROOT = Path(__file__).parents[2]
NAME = "measured"
SECONDS = 120.0
END_SECONDS = 10.0
T = TypeVar("T")


class RunningJob:
    """`ddpjob run` of `spec` in `directory`, which is the shared folder's parent."""

    def __init__(self, directory: Path, spec: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self.shared = directory / "shared"
        self._output = directory / "output.txt"
        file = directory / "job.yaml"
        body = {"apiVersion": "training.ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": NAME}}
        env = [{"name": name, "value": value} for name, value in environ.items() if name not in os.environ]
        file.write_text(yaml.safe_dump({**body, "spec": {**spec, "env": env}}))
        paths = (ROOT / "operator", ROOT / "trainer_image", ROOT)
        self.asked = time.time()
        """When the command was given, in epoch seconds."""
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ddpjob_operator.cli.main", "run", str(file), "--shared", str(self.shared)],
                env={**environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """What `ddpjob run` and its pods have said."""
        texts = [self._output.read_text()]
        texts += [f"---- {log}\n{log.read_text(errors='replace')}" for log in sorted(self.logs.glob("pods/*.log"))]
        return "\n".join(texts)

    @property
    def logs(self) -> Path:
        return self.shared / "logs" / NAME

    def pod_log(self, attempt: int, node_rank: int = 0) -> Path:
        """What a pod's processes print; there from the moment at which the pod is started."""
        return self.logs / "pods" / f"{NAME}-{attempt}-{node_rank}.log"

    def events(self, kind: str, attempt: int = 0) -> list[dict[str, Any]]:
        """Lines of events.jsonl."""
        try:
            lines = (self.logs / "events.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if event["event"] == kind and event["attempt"] == attempt]

    def wait(self, look: Callable[[], T | None], what: str) -> T:
        """The first true value of `look`. Raises SystemExit if there is none in time."""
        deadline = time.monotonic() + SECONDS
        while not (value := look()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{what}: not within {SECONDS:.0f} s")
            time.sleep(0.005)
        return value

    def wait_for_event(self, kind: str, attempt: int = 0) -> dict[str, Any]:
        return self.wait(lambda: self.events(kind, attempt), f"event {kind} of attempt {attempt}")[0]

    def rank(self, rank: int, attempt: int = 0) -> int:
        """Process id of a rank."""
        wanted = {f"RANK={rank}", f"DDPJOB_ATTEMPT={attempt}"}
        return self.wait(
            lambda: next((pid for pid in processes.descendants(self.process.pid) if wanted <= _environ(pid)), None),
            f"rank {rank} of attempt {attempt}",
        )

    def end(self) -> int:
        """The exit code, once it has ended by itself."""
        return self.process.wait(SECONDS)


@contextmanager
def running(directory: Path, spec: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Iterator[RunningJob]:
    """Start a job; whatever is left of it in the end is killed."""
    job = RunningJob(directory, spec, environ)
    try:
        yield job
    except BaseException:
        print(job.output, file=sys.stderr)
        raise
    finally:
        everything = [job.process.pid, *processes.descendants(job.process.pid)]
        processes.send(everything, signal.SIGCONT)
        # Its pods feel that it is gone, and end with their scratch; whatever does not is killed.
        job.process.kill()
        job.process.wait()
        deadline = time.monotonic() + END_SECONDS
        while (left := [pid for pid in everything if processes.alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        processes.send(left, signal.SIGKILL)


def _environ(pid: int) -> set[str]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"))
    except OSError:
        return set()
