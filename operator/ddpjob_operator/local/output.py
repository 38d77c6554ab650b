"""The output of the ranks while they run, from the log files of their pods to the display."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

MOST_BYTES: Final = 256 << 10
"""Shown of what one pod has written since the last look; a script that prints in a loop would leave no time for
anything else.
"""
_LONGEST_LINE: Final = 64 << 10
"""Of a line without an end, more than this is shown in parts."""
_OF_ANOTHER_RANK = re.compile(rb"\[local rank [1-9]\d*\] ")


class Logs(StrEnum):
    """Whose output `ddpjob run` shows."""

    ALL = "all"
    RANK = "rank"
    NONE = "none"


class Source(Protocol):
    """What is read here of a pod."""

    @property
    def uid(self) -> str: ...
    @property
    def node_rank(self) -> int | None: ...
    @property
    def log(self) -> Path: ...
    @property
    def log_start(self) -> int: ...


@dataclass(slots=True)
class _Followed:
    pod: Source
    position: int
    partial: bytes = b""


class OutputFollower:
    """Says each new line of the pods that `logs` names. `rank` is node rank 0's: what its rank 0 prints is there."""

    def __init__(self, logs: Logs, say: Callable[[str], None]) -> None:
        self._logs = logs
        self._say = say
        self._followed: dict[str, _Followed] = {}

    def look(self, pods: Iterable[Source]) -> None:
        """Show what is new in the logs of `pods` and, for the last time, of those that were there before."""
        if self._logs is Logs.NONE:
            return
        present = {pod.uid: pod for pod in pods}
        for uid, pod in present.items():
            self._followed.setdefault(uid, _Followed(pod, pod.log_start))
        for uid, followed in list(self._followed.items()):
            self._read(followed)
            if uid not in present:
                self._end(followed)
                del self._followed[uid]

    def close(self) -> None:
        """Show what is left, lines without an end too."""
        for followed in self._followed.values():
            self._read(followed)
            self._end(followed)
        self._followed.clear()

    def _read(self, followed: _Followed) -> None:
        shown = self._logs is Logs.ALL or followed.pod.node_rank == 0
        try:
            with followed.pod.log.open("rb") as log:
                size = log.seek(0, 2)
                skipped = max(0, size - followed.position - MOST_BYTES)
                log.seek(followed.position + skipped)
                data = log.read(MOST_BYTES)
        except OSError:
            return
        followed.position += skipped + len(data)
        if not shown:
            return
        if skipped:
            followed.partial = b""
            self._say(f"… {skipped} bytes are only in {followed.pod.log}")
        *lines, rest = (followed.partial + data).split(b"\n")
        rest = _last_state(rest)
        if len(rest) > _LONGEST_LINE:
            begin = _OF_ANOTHER_RANK.match(rest)  # says of each part whose it is
            lines, rest = [*lines, rest], begin[0] if begin else b""
        followed.partial = rest
        for line in lines:
            self._show(followed.pod, line)

    def _end(self, followed: _Followed) -> None:
        if followed.partial:
            self._show(followed.pod, followed.partial)
            followed.partial = b""

    def _show(self, pod: Source, line: bytes) -> None:
        # of progress bars, which go back to the beginning of the line, the last state: ranks may share a line
        line = line.rstrip(b"\r").rpartition(b"\r")[2]
        if self._logs is Logs.RANK and _OF_ANOTHER_RANK.match(line):
            return
        text = line.decode(errors="replace")
        printable = "".join(character for character in text if character.isprintable() or character == "\t")
        self._say(f"[node {pod.node_rank}] {printable}" if self._logs is Logs.ALL else printable)


def _last_state(line: bytes) -> bytes:
    """Of a line that goes on, what the next carriage return would leave: a progress bar writes for days without an end.
    The return that it has just written is kept."""
    shown = line.rstrip(b"\r")
    return shown[shown.rfind(b"\r") + 1 :] + line[len(shown) :][:1]
