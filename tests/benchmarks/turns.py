"""Programs that train side by side and take turns: while one makes its steps, every process of the other stands still.

Each rank calls `Turns.step()` as the first thing of each step. There it waits until the `Referee` gives it so many
steps; what is measured is the time from there to the same place that many steps later, so everything that a program
does in between counts, and nothing that it did to start.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from tests.benchmarks.table import Cost, processor_seconds

from ddp_trainer.contract import processes

SOCKET = "BENCHMARK_TURNS"
"""The variable that names the referee's Unix socket."""
JOIN_SECONDS = 120.0


class Turns:
    """A rank's side. Once the referee has left, steps are no longer counted and `step` is False."""

    def __init__(self, player: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ[SOCKET])
        self._lines: IO[Any] = connection.makefile("rw")
        self._send({"player": player, "rank": int(os.environ.get("RANK", "0")), "pid": os.getpid()})
        self._left = 0
        self._began: float | None = None
        self._is_over = False

    def step(self) -> bool:
        """A step begins: wait for a turn if there is none."""
        if self._is_over:
            return False
        if self._left == 0:
            if self._began is not None:
                if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                    torch.cuda.synchronize()  # what was only queued is not done
                self._send({"seconds": time.perf_counter() - self._began})
            self._left = int(self._lines.readline() or 0)
            self._is_over = self._left == 0
            self._began = time.perf_counter()
        self._left -= 1
        return not self._is_over

    def _send(self, message: dict[str, Any]) -> None:
        _write(self._lines, json.dumps(message) + "\n")


@dataclass(frozen=True, slots=True)
class Player:
    """A program at the table: `root` is the process that started all of it, `ranks` are those that take turns."""

    name: str
    root: int
    ranks: dict[int, int]
    lines: tuple[IO[Any], ...]

    def play(self, steps: int, meanwhile: Callable[[], None] = lambda: None) -> Cost:
        """Let it make so many steps: the seconds of its slowest rank, and the processor's of all its processes."""
        self._signal(signal.SIGCONT)
        before = processor_seconds(self.root)
        for line in self.lines:
            _write(line, f"{steps}\n")
        meanwhile()
        answers = [line.readline() for line in self.lines]
        if not all(answers):
            raise SystemExit(f"{self.name}: a rank has ended before its turn was over")
        seconds = max(json.loads(answer)["seconds"] for answer in answers)
        cost = Cost(seconds, processor_seconds(self.root) - before)
        self._signal(signal.SIGSTOP)
        return cost

    def let_go(self) -> None:
        """No more turns: it goes on by itself."""
        self._signal(signal.SIGCONT)
        for line in self.lines:
            line.close()

    def _signal(self, number: int) -> None:
        """To all but the ranks, which wait for their turn anyhow."""
        everything = {self.root, *processes.descendants(self.root)}
        processes.send(everything - set(self.ranks.values()), number)


class Referee:
    """Gives turns to the players that find `path`."""

    def __init__(self, path: Path) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._server.settimeout(JOIN_SECONDS)

    def seat(self, name: str, root: int, ranks: int) -> Player:
        """Wait until all ranks of a player are about to begin their first step, then have the others stand still."""
        lines: dict[int, IO[Any]] = {}
        pids = {}
        while len(lines) < ranks:
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                raise SystemExit(f"{name}: {len(lines)} of {ranks} ranks within {JOIN_SECONDS:.0f} s") from None
            line: IO[Any] = connection.makefile("rw")
            hello = json.loads(line.readline())
            assert hello["player"] == name, hello
            lines[hello["rank"]], pids[hello["rank"]] = line, hello["pid"]
        return Player(name, root, pids, tuple(lines.values()))


@contextmanager
def referee(directory: Path) -> Iterator[tuple[Referee, dict[str, str]]]:
    """A referee, and the environment in which programs find it."""
    path = directory / "turns"
    judge = Referee(path)
    try:
        yield judge, {**os.environ, SOCKET: str(path)}
    finally:
        judge._server.close()


def _write(line: IO[Any], text: str) -> None:
    line.write(text)
    line.flush()
