"""Pods of one machine: the real launcher, the real torchrun, and small real scripts as the training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.ports import free_port
from tests.support.starting import starts_processes
from tests.support.waiting import PATIENCE_SECONDS, eventually
from tests.trainer.forked import start as forked

from ddp_trainer.contract import processes, run_dir
from ddp_trainer.contract.environment import PodEnvironment

ROOT = Path(__file__).parents[3]


class Pod:
    """One launcher process with a run directory, a volume and a termination log of its own. It is forked with torch
    imported, and so are its agent and ranks (tests/trainer/forked), unless `fresh`.
    """

    def __init__(
        self, directory: Path, shared: Path, argv: list[str], env: dict[str, str], fresh: bool = False
    ) -> None:
        # in memory, as in a pod: a heartbeat that waits for a busy disk looks like a rank that stands still
        self.run_dir = Path(tempfile.mkdtemp(prefix="ddpjob-test-", dir="/dev/shm")) / "run"
        self.directory = directory
        self.shared = shared
        self._termination_log = directory / "termination-log"
        self._log = directory / "log"
        settings = {
            "DDPJOB_NAME": "digits",
            "DDPJOB_NAMESPACE": "default",
            "DDPJOB_UID": f"uid-{directory.name}",
            "DDPJOB_CREATED": "1763704000",
            "DDPJOB_ATTEMPT": "0",
            "DDPJOB_NODE_RANK": "0",
            "DDPJOB_NODES": "1",
            "DDPJOB_PROCS_PER_NODE": "1",
            "DDPJOB_POD_NAME": "digits-0-0",
            "DDPJOB_NODE_NAME": "here",
            "POD_IP": "127.0.0.1",
            "DDPJOB_RDZV_HOST": "127.0.0.1",
            "DDPJOB_RDZV_PORT": str(free_port()),
            "DDPJOB_STATUS_PORT": "0",
            "DDPJOB_SHARED": str(shared),
            "DDPJOB_RUN_DIR": str(self.run_dir),
            "DDPJOB_TERMINATION_LOG": str(self._termination_log),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "trainer_image"),
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DDPJOB_")}
        with self._log.open("wb") as log:
            command, environment = ["-m", "ddp_trainer.launch", *argv], inherited | settings | env
            self.process: subprocess.Popen[bytes] | forked.Forked = (
                subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log)
                if fresh
                else forked.Forked(command, environment, log.fileno())
            )

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """The launcher's exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher still runs after {seconds} s; its log:\n{self.log}")

    @property
    def message(self) -> dict[str, Any]:
        """The termination message, which is there once the launcher has ended."""
        return json.loads(self._termination_log.read_bytes())

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def pids(self, count: int = 1) -> dict[int, int]:
        """rank → pid, once `count` ranks of this pod have started."""

        def started() -> dict[int, int] | None:
            found = {entry["rank"]: entry["pid"] for entry in run_dir.registrations(self.run_dir)}
            return found if len(found) >= count else None

        return eventually(started, f"{count} ranks started; log:\n{self.log}")

    def wait_for(self, text: str) -> None:
        """Until the pod's log has `text`."""
        eventually(lambda: text in self.log, f"{text!r} in the log")

    def get(self, path: str, host: str = "127.0.0.1") -> bytes:
        written = self.run_dir / "port"
        port = eventually(lambda: written.exists() and written.read_text(), "the status page")
        with urllib.request.urlopen(f"http://{host}:{int(port)}{path}", timeout=60) as response:
            return response.read()

    def status(self, host: str = "127.0.0.1") -> dict[str, Any]:
        return json.loads(self.get("/status", host))

    def end(self) -> None:
        left = [self.process.pid, *processes.descendants(self.process.pid)]
        processes.send(left, signal.SIGCONT)
        processes.send(left, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.run_dir.parent, ignore_errors=True)


StartPod = Callable[..., Pod]


@pytest.fixture
@starts_processes
def start_pod(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StartPod]:
    """`start_pod(script, *args, **environment)` starts a launcher whose ranks run the text `script`; processes are new
    ones if `fresh`, and in modules that set FRESH.
    """
    all_fresh = getattr(request.module, "FRESH", False)
    pods: list[Pod] = []

    def start(
        script: str | Path, *args: str, argv: list[str] | None = None, fresh: bool = all_fresh, **env: str
    ) -> Pod:
        directory = tmp_path / f"pod{len(pods)}"
        directory.mkdir()
        path = script if isinstance(script, Path) else directory / "train.py"
        if isinstance(script, str):
            path.write_text(textwrap.dedent(script))
        pods.append(Pod(directory, tmp_path / "shared", argv or ["--script", str(path), "--", *args], env, fresh))
        return pods[-1]

    yield start
    for pod in pods:
        pod.end()


@pytest.fixture
def pod(tmp_path: Path) -> PodEnvironment:
    """Node rank 0 of two."""
    return PodEnvironment(
        job="digits",
        namespace="default",
        uid="0b0c",
        attempt=0,
        node_rank=0,
        nodes=2,
        procs_per_node=1,
        pod_ip="127.0.0.1",
        rdzv_host="127.0.0.1",
        rdzv_port=29500,
        status_port=0,
        shared=tmp_path,
        run_dir=tmp_path,
        termination_log=tmp_path / "log",
    )


def place(folder: Path, *, attempt: int, node_rank: int | str, nodes: int) -> Path:
    """Write a pod's place in the gang into `folder` as the kubelet does: all three files at once, by one rename."""
    folder.mkdir(exist_ok=True)
    link = folder / "..data"
    before = link.resolve() if link.is_symlink() else None
    data = Path(tempfile.mkdtemp(prefix="..", dir=folder))
    for name, value in (("attempt", attempt), ("node-rank", node_rank), ("nodes", nodes)):
        (data / name).write_text(str(value))
        if before is None:
            (folder / name).symlink_to(Path("..data", name))
    new = folder / "..data_tmp"
    new.symlink_to(data.name)
    new.replace(link)
    if before is not None:
        shutil.rmtree(before)
    return folder


@pytest.fixture(name="place", scope="session")
def place_fixture() -> Callable[..., Path]:
    return place
