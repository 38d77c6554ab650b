"""Launchers, torchrun, ranks and operators that are forked by servers, one for each set of modules that one has
imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from tests.support.leftovers import VARIABLE, name_this_run
from tests.support.one_for_all import one_for_all
from tests.support.waiting import eventually

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PACKAGES = (ROOT / "operator", ROOT / "trainer_image", ROOT)
TORCH = (
    "torch",
    "torch.distributed.run",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.utils.tensorboard",
    "safetensors.torch",
)
LIBRARIES = ("transformers.trainer", "transformers.models.bert.modeling_bert", "lightning.pytorch", "accelerate")
RUNS = (*TORCH, "tests.support.local_run")
"""For `ddpjob run`; launchers and ranks that it starts find nothing of their own imported."""
_servers = ExitStack()


def command(ranks: int, *arguments: str, imported: tuple[str, ...] = ()) -> list[str]:
    """What runs `-m MODULE …` or `SCRIPT …` in so many ranks of a torchrun; 0 is one process without torchrun."""
    forked = [sys.executable, "-SE", str(HERE / "client.py"), _address(TORCH + imported)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python"]
    return [*forked, *torchrun, *forked, *arguments] if ranks else [*forked, *arguments]


def forked(*arguments: str, imported: tuple[str, ...]) -> list[str]:
    """What runs `-m MODULE …` in a process that has imported these and nothing else. It reads nothing, and gets the
    signals that this one gets.
    """
    return [sys.executable, "-SE", str(HERE / "client.py"), _address(imported), *arguments]


class Forked:
    """A forked process, as a subprocess.Popen: it is this very process, and it ends with this one."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        output: int,
        *,
        imported: tuple[str, ...] = TORCH,
        folder: Path | None = None,
    ) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(_address(imported))
        socket.send_fds(self._server, [b"F"], [output, output])
        request = {"command": command, "folder": str(folder or Path.cwd()), "environment": environment}
        self._server.sendall(json.dumps(request).encode() + b"\n")
        self._lines = self._server.makefile()
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative if a signal ended it; None while it runs."""
        return self._wait(0)

    def wait(self, seconds: float | None = None) -> int:
        """The same once it has ended. Raises TimeoutExpired."""
        code = self._wait(seconds)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", seconds or 0)
        return code

    def _wait(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._server], [], [], seconds)[0]:
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._server.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ConnectionError):  # it has ended since
                self._server.send(bytes([number]))

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _address(imported: tuple[str, ...]) -> str:
    """Of the server that has imported these, which all workers of a test run share."""
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    name = hashlib.sha256(" ".join(imported).encode()).hexdigest()[:12]
    address: str = _servers.enter_context(one_for_all(folder, name, lambda: _server(folder / name, imported)))
    return address


@contextmanager
def _server(address: Path, imported: tuple[str, ...]) -> Iterator[str]:
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), str(address), *imported],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, PACKAGES))},
        stdin=subprocess.PIPE,
    )
    try:
        eventually(lambda: address.exists() or server.poll() is not None, "the server of forked ranks")
        assert server.poll() is None
        yield str(address)
    finally:
        server.communicate()
        address.unlink(missing_ok=True)


def _folder() -> Path:
    name_this_run()  # a program of its own may not have
    return Path(tempfile.gettempdir(), f"forked-{os.environ[VARIABLE]}")


def stop() -> None:
    """End those of this process, once no other worker uses them. One whose pytest has been killed ends as well: its
    standard input does.
    """
    _servers.close()
    _address.cache_clear()


def clear() -> None:
    """Remove what the servers of a run had in common, after the last worker."""
    shutil.rmtree(_folder(), ignore_errors=True)
