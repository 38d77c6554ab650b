"""What this pod prints, passed on to its log as it comes and copied to the volume, where it outlives the pod.

Standard output and error of this process become pipes, which torchrun and the ranks inherit. A thread passes on what
comes. Another one writes the copy, a line with its time: a volume that is full, slow or hung holds up neither training
nor the pod's log, and then the copy lacks lines. A file is kept below `MOST_BYTES`: a script that prints in a loop must
not take the room of the snapshots.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.pod_logs import header, stamp

MOST_BYTES: Final = 32 << 20
"""Of a file. One that would be larger loses the older half of its lines."""
MOST_WAITING: Final = 4 << 20
"""Bytes that wait for the volume at most; then the oldest are left out."""
SECONDS_BETWEEN_WRITES: Final = 0.5
SECONDS_BETWEEN_TRIES: Final = 5.0
"""After an error of the volume."""
CLOSE_SECONDS: Final = 2.0
"""How long the end of the pod waits for the volume."""
_CHUNK: Final = 65536
_LONGEST_LINE: Final = 65536
_STREAMS: Final = (1, 2)


class _Target(NamedTuple):
    path: Path
    pod_name: str
    uid: str
    ranks: int


def copy_output(pod: PodEnvironment) -> OutputCopy | None:
    """Begin to, unless this pod does not; `close` ends it."""
    return OutputCopy(pod) if pod.name is not None and pod.keeps_output else None


class OutputCopy:
    """The copy of one pod's output. `close` must be called, and nothing printed by a child of this process after it."""

    def __init__(self, pod: PodEnvironment) -> None:
        self._target = _target(pod)
        self._copy = _Copy()
        self._streams: list[_Stream] = []
        self._reading = threading.Lock()
        self._closing, self._wake = os.pipe()
        self._streams = [_Stream(number) for number in _STREAMS]
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def go_on(self, pod: PodEnvironment) -> None:
        """From now on it is the output of the place that `pod` has; no process of the former one is left."""
        with self._reading:
            self._pass_on()
            self._target = _target(pod)

    def close(self) -> None:
        """Pass on and write what is there, and give standard output and error back."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for taken in self._streams:
            taken.give_back()
        os.close(self._wake)
        self._thread.join()
        for taken in self._streams:
            taken.close()
        self._copy.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._closing, selectors.EVENT_READ)
            for stream in self._streams:
                selector.register(stream, selectors.EVENT_READ)
            is_over = False
            while not is_over:
                is_over = any(key.fileobj == self._closing for key, _ in selector.select())
                with self._reading:
                    self._pass_on(is_over=is_over)
        os.close(self._closing)

    def _pass_on(self, *, is_over: bool = False) -> None:
        """All that is there now, a part of each stream in turn: one that comes without a pause keeps no other back."""
        while parts := [(stream, chunk) for stream in self._streams if (chunk := stream.read())]:
            for stream, chunk in parts:
                self._add(stream.lines(chunk))
        for stream in self._streams if is_over else ():
            self._add(stream.lines(b"\n") if stream.has_partial else [])

    def _add(self, lines: list[bytes]) -> None:
        if lines and self._target is not None:  # what a spare prints before it has a place is in its log alone
            now = stamp(time.time()).encode()
            self._copy.add(self._target, b"".join(b"%b %b\n" % (now, line) for line in lines))


class _Stream:
    """Standard output or error, taken over: a pipe in its place, and where it led to."""

    def __init__(self, number: int) -> None:
        self._number, self._original = number, os.dup(number)
        self._pipe, write = os.pipe()
        os.set_blocking(self._pipe, False)
        os.dup2(write, number)
        os.close(write)
        self._partial = b""

    def fileno(self) -> int:
        return self._pipe

    @property
    def has_partial(self) -> bool:
        return bool(self._partial)

    def read(self) -> bytes:
        """A part of what has come, which is passed on; empty if nothing is there."""
        try:
            chunk = os.read(self._pipe, _CHUNK)
        except BlockingIOError:
            return b""
        rest = memoryview(chunk)
        with contextlib.suppress(OSError):  # the reader of the pod's log may be gone; the ranks must not stop for that
            while rest:
                rest = rest[os.write(self._original, rest) :]
        return chunk

    def lines(self, chunk: bytes) -> list[bytes]:
        """Those that it ends. Of a progress bar, which goes back to the beginning of its line, the last state."""
        *lines, rest = (self._partial + chunk).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            rest = rest.rstrip(b"\r").rpartition(b"\r")[2]
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._partial = rest
        return [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]

    def give_back(self) -> None:
        os.dup2(self._original, self._number)

    def close(self) -> None:
        os.close(self._pipe)
        os.close(self._original)


class _Copy:
    """Appends to files on the volume, in a thread of its own."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[_Target, bytes]] = deque()
        self._bytes = self._left_out = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._refused = False
        self._open: tuple[_Target, int] | None = None
        self._begun: _Target | None = None
        """Whose header is written."""
        self._thread = threading.Thread(target=self._run, name="copy of the output", daemon=True)
        self._thread.start()

    def add(self, target: _Target, data: bytes) -> None:
        """Have whole lines written; never waits for the volume."""
        with self._changed:
            self._waiting.append((target, data))
            self._bytes += len(data)
            while self._bytes > MOST_WAITING:
                self._drop()
            self._changed.notify()

    def close(self) -> None:
        """Wait until all is written, for CLOSE_SECONDS at most."""
        self._closing.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)

    def _drop(self) -> None:
        _, data = self._waiting.popleft()
        self._bytes -= len(data)
        self._left_out += len(data)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
                if not self._waiting:
                    return
                target, data = self._take()
            try:
                self._append(target, data)
            except OSError as error:
                self._put_back(target, data)
                self._forget()
                self._report(target.path, error)
                if self._closing.wait(SECONDS_BETWEEN_TRIES):
                    return
            else:
                self._refused = False
                self._closing.wait(SECONDS_BETWEEN_WRITES)

    def _take(self) -> tuple[_Target, bytes]:
        """All that waits for the first file."""
        target, parts = self._waiting[0][0], list[bytes]()
        if self._left_out:
            text = f"ddpjob: {self._left_out} bytes are not here: the volume did not take them in time"
            parts.append(f"{stamp(time.time())} {text}\n".encode())
            self._left_out = 0
        while self._waiting and self._waiting[0][0] == target:
            data = self._waiting.popleft()[1]
            self._bytes -= len(data)
            parts.append(data)
        return target, b"".join(parts)

    def _put_back(self, target: _Target, data: bytes) -> None:
        with self._changed:
            self._waiting.appendleft((target, data))
            self._bytes += len(data)
            while self._bytes > MOST_WAITING:
                self._drop()

    def _append(self, target: _Target, data: bytes) -> None:
        """All of it or nothing. Raises OSError."""
        if self._open is None or self._open[0] != target:
            self._forget()
            self._open = target, _opened(target.path)
        if self._begun != target:
            data = header(time.time(), target.pod_name, target.uid, target.ranks) + data
        descriptor = self._open[1]
        before = os.fstat(descriptor).st_size
        if before + len(data) > MOST_BYTES and before > MOST_BYTES // 2:
            _halve(target)
            self._forget()
            descriptor = _opened(target.path)
            self._open, before = (target, descriptor), os.fstat(descriptor).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, before)
            raise
        self._begun = target

    def _forget(self) -> None:
        if self._open is not None:
            with contextlib.suppress(OSError):
                os.close(self._open[1])
            self._open = None

    def _report(self, path: Path, error: OSError) -> None:
        if not self._refused:
            self._refused = True
            text = f"{path} cannot be written: {error.strerror or error}; until it can be, output is in the pod's log"
            with contextlib.suppress(OSError):
                print(f"ddpjob: {text} alone", file=sys.stderr, flush=True)


def _target(pod: PodEnvironment) -> _Target | None:
    path = pod.output_log
    return None if path is None else _Target(path, str(pod.name), pod.uid, pod.procs_per_node)


def _opened(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _halve(target: _Target) -> None:
    """Replace the file by one with its newer half."""
    part = target.path.with_suffix(".part")
    with target.path.open("rb") as old, part.open("wb") as new:
        now = time.time()
        new.write(header(now, target.pod_name, target.uid, target.ranks))
        new.write(f"{stamp(now)} ddpjob: older lines than the next are not kept\n".encode())
        old.seek(-MOST_BYTES // 2, os.SEEK_END)
        old.readline()
        while chunk := old.read(1 << 20):
            new.write(chunk)
    part.replace(target.path)
