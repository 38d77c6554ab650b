"""What an exception means: the exit code and reason of docs/contracts.md sections 3 and 5, and a rank's record of it.

Classes of torch are known by name and messages by their text: the launcher reads the same tables without torch.
"""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ddp_trainer.contract.exit_codes import (
    EXIT_FAILED,
    EXIT_FENCED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_USER,
    FencedError,
    Left,
    LiveRecoveryFailed,
    LossNotFinite,
    Preempted,
    RollBack,
    StoppedTooFew,
    UserError,
)
from ddp_trainer.contract.json_files import FULL, read_json, reserve, write_json
from ddp_trainer.contract.messages import device_fault, no_memory, no_rendezvous, no_space, peer_lost

RESERVED_BYTES: Final = 16 << 10
MESSAGE_BYTES: Final = 2048
"""Of an outcome's message, where there is no room for more."""

_USER_ERROR: Final = f"{UserError.__module__}.{UserError.__qualname__}: "

ExitClass = tuple[int, str]
"""An exit code and a reason."""

_OF_SOCKETS: Final = "DistNetworkError"
"""Of torch's; it has the words of the operating system alone."""
_OF_MACHINES: Final = frozenset({"DiskFull", "OutOfMemory", "PeerLost", "RendezvousFailed"})
_USAGE: Final = 2
"""With which argparse ends, and Python itself for a bad command line."""

BY_EXIT_CODE: Final[dict[int, ExitClass]] = {
    EXIT_OK: (EXIT_OK, "Completed"),
    EXIT_USER: (EXIT_USER, "UserError"),
    EXIT_FENCED: (EXIT_FENCED, "Fenced"),
    EXIT_PREEMPTED: (EXIT_PREEMPTED, "Preempted"),
    _USAGE: (EXIT_USER, "UserError"),
}


def classify(error: BaseException) -> ExitClass:
    """The exit code and the reason of the process that this exception ends."""
    if isinstance(error, SystemExit):
        code, peer = _exit_code(error), _lost_peer(error)
        if peer is not None and code == _USAGE:  # not argparse's
            return EXIT_FAILED, classify(peer)[1]
        if peer is not None and classify_exit(code)[1] == "WorkerException":
            return code, classify(peer)[1]
        return classify_exit(code)
    for cause in _chain(error):
        exit_class = _classify_one(cause)
        if exit_class is not None:
            return exit_class
    return EXIT_FAILED, "WorkerException"


def is_peer_lost(error: BaseException) -> bool:
    """Whether a collective failed because another rank has left it."""
    return classify(error)[1] in ("PeerLost", "RendezvousFailed")


def is_of_machine(error: BaseException) -> bool:
    """Whether a device, memory, a volume, a network or another rank has failed: what the program did may be right, and
    may work on another machine.
    """
    reason = classify(error)[1]
    return reason in _OF_MACHINES or (
        reason == "WorkerException" and (isinstance(error, OSError) or device_fault(str(error)))
    )


def _lost_peer(error: SystemExit) -> BaseException | None:
    """The exception that a script has caught, and left for, where it only says that another rank is gone. Of any other
    it would say less: some scripts run as a whole in the handler of an ImportError. An exit may be caught, too, and be
    raised from itself.
    """
    caught: BaseException | None = error
    for _ in range(10):
        if isinstance(caught, SystemExit):
            caught = caught.__cause__ or caught.__context__
    return None if caught is None or isinstance(caught, SystemExit) or not is_peer_lost(caught) else caught


def classify_exit(code: int) -> ExitClass:
    """The same for a process that chose its own exit code."""
    return BY_EXIT_CODE.get(code, (code, "WorkerException" if signal_of(code) is None else "WorkerKilled"))


_AS_NEGATIVE: Final = frozenset({signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV})
"""Signals that 256 - N stands for too, as in sys.exit(process.returncode). 255, of sys.exit(-1), stands for none."""


def signal_of(code: int) -> str | None:
    """The signal that an exit code stands for where a script passes on how a program ended: 128 + N, or 256 - N."""
    number = 256 - code if 256 - code in _AS_NEGATIVE else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


def _classify_one(error: BaseException) -> ExitClass | None:
    if isinstance(error, LossNotFinite | RollBack):
        return error.exit_code, "LossNotFinite"
    if isinstance(error, StoppedTooFew):
        return error.exit_code, "Preempted"
    if isinstance(error, LiveRecoveryFailed):
        return error.exit_code, "LiveRecoveryFailed"
    if isinstance(error, UserError | SyntaxError):
        return EXIT_USER, "UserError"
    if isinstance(error, ImportError):
        return EXIT_USER, "ImportError"
    if isinstance(error, FencedError):
        return EXIT_FENCED, "Fenced"
    if isinstance(error, Left):
        return EXIT_PREEMPTED, "Left"
    if isinstance(error, Preempted):
        return EXIT_PREEMPTED, "Preempted"
    text = str(error)
    if (_of_another_process(error) or "").startswith(_USER_ERROR):
        return EXIT_USER, "UserError"
    if isinstance(error, OSError):
        return (EXIT_FAILED, "DiskFull") if error.errno in FULL else None
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return EXIT_FAILED, "OutOfMemory"
    if no_space(text):
        return EXIT_FAILED, "DiskFull"
    if type(error).__name__.startswith("Rendezvous"):
        return EXIT_FAILED, "RendezvousFailed"
    # torch raises RuntimeError, or a Dist…Error derived from it, for all of these. An OSError with the same words
    # comes from the script's own sockets and says nothing about ranks.
    if isinstance(error, RuntimeError):
        if no_rendezvous(text):
            return EXIT_FAILED, "RendezvousFailed"
        if peer_lost(text) or (type(error).__name__ == _OF_SOCKETS and peer_lost(f"{_OF_SOCKETS}: {text}")):
            return EXIT_FAILED, "PeerLost"
        if no_memory(text):
            return EXIT_FAILED, "OutOfMemory"
    return None


def _of_another_process(error: BaseException) -> str | None:
    """What torch.multiprocessing.spawn's error was in the process that raised it; None for any other error."""
    if type(error).__name__ != "ProcessRaisedException":
        return None
    return str(error).strip().rpartition("\n")[2]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised `from`, at most ten deep."""
    cause: BaseException | None = error
    for _ in range(10):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return EXIT_OK
    return error.code & 0xFF if isinstance(error.code, int) else EXIT_FAILED


def exit_text(error: SystemExit) -> str | None:
    """What Python prints where a script exits with this instead of a number, such as the exception that it caught."""
    if error.code is None or isinstance(error.code, int):
        return None
    try:
        return str(error.code)
    except Exception:
        return object.__repr__(error.code)


def outcome_of(error: BaseException | None, *, rank: int, local_rank: int, pid: int) -> dict[str, Any]:
    """The record of a rank that ended by `error`, or in order (None).

    A message with exit code 143 says that the script chose this code: maybe nobody has asked it to stop.
    """
    code, reason = (EXIT_OK, "Completed") if error is None else classify(error)
    outcome: dict[str, Any] = {
        "version": 1,
        "rank": rank,
        "localRank": local_rank,
        "pid": pid,
        "time": time.time(),
        "exitCode": code,
        "reason": reason,
        "exception": None,
        "message": None,
        "traceback": None,
        "cut": None,
    }
    if error is None or code == EXIT_OK or (code == EXIT_PREEMPTED and not isinstance(error, SystemExit)):
        return outcome
    if isinstance(error, SystemExit):
        outcome["message"] = exit_text(error) or f"exited with code {_exit_code(error)}{_on_lost_peer(error)}"
        return outcome
    outcome["exception"] = _qualified_name(error)
    message = _of_another_process(error) or str(error) or type(error).__name__
    outcome["message"] = message.removeprefix(_USER_ERROR)
    if not isinstance(
        error, UserError | RollBack | LiveRecoveryFailed
    ):  # their messages say what to do; where they were raised is no help
        outcome["traceback"] = "".join(traceback.format_exception(_trimmed(error)))
    return outcome


def _on_lost_peer(error: SystemExit) -> str:
    peer = _lost_peer(error)
    if peer is None:
        return ""
    first = str(peer).strip().partition("\n")[0]
    return f" on {_qualified_name(peer)}: {first}"


def write_outcome(run_dir: Path, outcome: dict[str, Any]) -> None:
    """Where the directory is full, without the traceback if need be; raises OSError where not even that fits."""
    path = _outcome_file(run_dir, outcome["rank"])
    try:
        write_json(path, outcome)
    except OSError as error:
        if error.errno not in FULL:
            raise
        write_json(path, outcome | {"traceback": None, "message": (outcome["message"] or "")[:MESSAGE_BYTES]})


def record_cut(run_dir: Path, rank: int, text: str) -> None:
    """Add to the record of a rank whose script had returned what was ended before it was done, in words."""
    path = _outcome_file(run_dir, rank)
    outcome = read_json(path)
    if outcome is not None:
        with contextlib.suppress(OSError):
            write_json(path, outcome | {"cut": text[:MESSAGE_BYTES]})


def reserve_outcome(run_dir: Path, rank: int) -> None:
    """Have memory for the record before the script runs, which may use up what there is."""
    reserve(_outcome_file(run_dir, rank), RESERVED_BYTES)


def _outcome_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "outcomes" / f"rank-{rank}.json"


def read_outcomes(run_dir: Path) -> list[dict[str, Any]]:
    """Every record that the ranks of this pod left, by rank."""
    read = (read_json(path) for path in (run_dir / "outcomes").glob("rank-*.json"))
    return sorted((outcome for outcome in read if outcome is not None), key=lambda outcome: outcome["rank"])


def _qualified_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _trimmed(error: BaseException) -> BaseException:
    """The same exception without the frames of what ran the script."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_runner(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return error.with_traceback(frames)


def _is_runner(filename: str) -> bool:
    return "runpy" in filename or filename.endswith("ddp_trainer/rank/worker.py")
