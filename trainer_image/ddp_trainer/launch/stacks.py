"""Python stacks of ranks that hang, taken before they are killed.

faulthandler writes them from a signal handler in C, so that a rank that holds the interpreter lock in a collective
answers too. A rank that was stopped by a signal answers once it is continued, with the very line where it stopped.
They are taken in the pod's own memory and only then copied to the volume, which may be what hangs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from ddp_trainer.contract import processes
from ddp_trainer.contract.run_dir import STACK_SIGNAL, stack_file

ANSWER_SECONDS = 1.0
"""Only a rank that is stuck in the kernel takes longer, and it will not answer at all; training waits meanwhile."""
COPY_SECONDS = 5.0
LONGEST_STACK = 8
_PACKAGES = re.compile(r"site-packages|/lib/python|<frozen |/ddp_trainer/rank/")
_COLLECTIVE = re.compile(r"/torch/(distributed/(?!elastic|launcher|run)|nn/parallel/distributed)")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


def dump_stacks(run_dir: Path, pids: Mapping[int, int], *, go_on: bool = True) -> dict[int, str]:
    """Ask the ranks (local rank → pid) for their stacks: local rank → text, empty for one that gave none.

    Without `go_on` a rank that was stopped stays so, and gives none. Nor does one whose script has closed the file: its
    stacks would go into whatever file has that descriptor now.
    """
    for local in pids:
        _empty(stack_file(run_dir, local))
    stopped = {local: pid for local, pid in pids.items() if processes.state(pid) in ("T", "t")}
    if not go_on:
        pids = {local: pid for local, pid in pids.items() if local not in stopped}
        stopped = {}
    answering = [pid for local, pid in pids.items() if processes.has_open(pid, stack_file(run_dir, local))]
    processes.send(answering, STACK_SIGNAL)
    # First those that can answer: a stopped rank that goes on lets the others leave the place where they waited for it.
    texts = _collect(run_dir, pids.keys() - stopped.keys(), ANSWER_SECONDS)
    processes.send(stopped.values(), signal.SIGCONT)
    return texts | _collect(run_dir, stopped, ANSWER_SECONDS)


def innermost_frame(text: str) -> str | None:
    """Where the script stood: `function (file:line)`, outside of installed packages where there is such a frame."""
    frames = _frames(text)
    own = [frame for frame in frames if _is_scripts(frame)]
    return _in_words((own or frames)[0]) if frames else None


def collective(text: str) -> str | None:
    """The function of torch.distributed that the script called last and that has not returned, such as `all_reduce`.

    `backward` for a backward pass, in which DistributedDataParallel waits for the other ranks. None for a script that
    stands somewhere else.
    """
    found = None
    for frame in _frames(text):
        if _is_scripts(frame):
            break
        if _COLLECTIVE.search(frame["file"]) and frame["function"] != "wrapper":
            found = frame["function"]
        elif found is None and frame["function"] == "_engine_run_backward":
            found = "backward"
    return found


def script_stack(text: str) -> str | None:
    """The script's own frames, the innermost first, in one line; None without a stack."""
    frames = _frames(text)
    own = [frame for frame in frames if _is_scripts(frame)] or frames
    return " < ".join(_in_words(frame) for frame in own[:LONGEST_STACK]) if own else None


def _frames(text: str) -> list[re.Match[str]]:
    """Of the thread that answered, which is the main one: the innermost first."""
    current = text[text.find("Current thread") :] if "Current thread" in text else text
    return list(_FRAME.finditer(current.split("\n\n")[0]))


def _is_scripts(frame: re.Match[str]) -> bool:
    return _PACKAGES.search(frame["file"]) is None


def _in_words(frame: re.Match[str]) -> str:
    return f"{frame['function']} ({Path(frame['file']).name}:{frame['line']})"


def _empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.truncate(path, 0)


def save_stacks(texts: Mapping[int, str], title: str, directories: list[Path], name: str) -> Path | None:
    """Write one file into the first directory that takes it within COPY_SECONDS, None if none does, or no thread can
    be started.
    """
    body = [title, ""]
    for rank, text in sorted(texts.items()):
        body += [f"==== rank {rank} ====", text or "no stack: the process did not answer", ""]
    for directory in directories:
        saved = threading.Event()

        def write(directory: Path = directory, saved: threading.Event = saved) -> None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                (directory / name).write_text("\n".join(body))
            except OSError:
                return
            saved.set()

        # a hung network volume blocks its writer for good, so the writer is a thread that may be left behind
        writer = threading.Thread(target=write, daemon=True)
        try:
            writer.start()
        except RuntimeError:  # no thread can be started now
            return None
        writer.join(COPY_SECONDS)
        if saved.is_set():
            return directory / name
    return None


def _collect(run_dir: Path, local_ranks: Collection[int], seconds: float) -> dict[int, str]:
    """Read until every file has text and none grows any more, or time is up."""
    deadline = time.monotonic() + seconds
    before: dict[int, str] = {}
    while True:
        texts = {local: _read(stack_file(run_dir, local)) for local in local_ranks}
        settled = all(texts.values()) and texts == before
        if settled or time.monotonic() >= deadline:
            return texts
        before = texts
        time.sleep(0.05)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
