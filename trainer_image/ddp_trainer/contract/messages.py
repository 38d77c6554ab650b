"""What messages of torch, NCCL, gloo and CUDA mean for the rank that prints them: another rank is gone, no rendezvous,
no memory, no space.

Only what decides how this pod ends is distinguished here. The operator's table (`core.failure.symptoms`) refines the
reason and has the advice. tests/unit/contracts/messages.toml has real messages, and what both make of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

# Ranks print what they like, in lines of any length: what may repeat within a pattern is bounded, or the time that a
# search takes grows with the square of the text.
_OVER_EFA: Final = r"NET/OFI .{0,500}(unre(sponsive|achable) re(mote|ceiver)|QP does not exist|peer closed its memory)"
"""libfabric's words. For some of them NCCL's plugin has no other error than that of a system call."""
_PEER_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset)|remote server shutdown|broken pipe|pair closure|monitoredBarrier"
    r"|^Operation timed out!|ncclRemoteError|remote process exited|NCCL communicator was aborted"
    r"|timed out waiting \d+ ?ms for (send|recv) operation"
    r"|Watchdog caught collective operation timeout"
    r"|gloo.{0,500}(timed out|connection refused|no route to host|network is unreachable)"
    r"|gloo connectFullMesh failed|watchdog got stuck for \d+|store->get\('[^']*'\) got (error|exception)"
    r"|signal notifying that (a remote rank|the store)|NCCL timeout (in|when waiting)"
    r"|DistNetworkError: (socket timeout|connection timed out|no route to host|network is unreachable)"
    r"|failed to execute operation connect from rank|dump signal (from another rank|due to .{1,40} from +rank \d)"
    rf"|{_OVER_EFA}",
    re.IGNORECASE | re.DOTALL,
)
_LOST_OVER_EFA = re.compile(_OVER_EFA, re.IGNORECASE)
_FROM_OUTSIDE = re.compile(
    r"^Caught \w{1,80} in (DataLoader worker process \d|_(apply_udf|pin_memory_loop|populate_queue|sort_worker)\b)"
    r"|^Data processing error: |\bCAS service error\b",
    re.IGNORECASE,
)
"""What torch raises again for a data loader worker, torchdata for a thread or process of its nodes, and hf_xet for a
download: they talk to servers, not to ranks.
"""
_TIMED_OUT = re.compile(
    r"timed out waiting|collective operation timeout|socket timeout|: operation timed out!", re.IGNORECASE
)
_NO_RENDEZVOUS = re.compile(
    r"client socket has (timed out|failed to connect)|wait timeout after"
    r"|timed out after \d+ seconds waiting for clients|\d/\d+ clients joined",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(\w{1,40}_)?ALLOC(ATION)?_FAILED"
    r"|CUFFT_ALLOC_FAILED",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(
    r"no space left on device|disk quota exceeded|inline_container\.cc.{0,80}unexpected pos"
    r"|PytorchStreamWriter failed writing file",
    re.IGNORECASE | re.DOTALL,
)
_DEVICE_FAULT = re.compile(
    r"(CUDA|HIP) (error|failure)|illegal memory access|(memory access fault|HW exception) by GPU|device-side assert"
    r"|out of memory|uncorrectable",
    re.IGNORECASE,
)
_OWN_FAULT = re.compile(
    rf"{_DEVICE_FAULT.pattern}|EnforceNotMet|enforce fail|collective mismatch|mismatched collective|message truncated"
    r"|unhandled (cuda|system) error|nccl(UnhandledCuda|System|Internal|InvalidUsage)"
    r"|free\(\): |malloc\(\): |double free|corrupted (size|double|unsorted)|stack smashing|assertion .{1,500} failed",
    re.IGNORECASE,
)
_SAYS_LATER = re.compile(r"unhandled system error|nccl(System|Internal)Error", re.IGNORECASE)
"""Of NCCL, which has its last error a few lines below."""
_FROM_RANKS = re.compile(r"nccl|c10d|gloo|tcpstore|process ?group|dist\w{1,50}error|\brank ?\d|what\(\)", re.IGNORECASE)
_TELLING = re.compile(
    r"what\(\):|terminate called|Fatal Python error|^\w*(Error|Exception): |last error:|killed", re.IGNORECASE
)
_WARNING = re.compile(r"^(\[rank\d+\]: ?|\[rank\d+\]:)?\[W[\d ]|\bwarning\b|NCCL INFO", re.IGNORECASE)
_WORDS: Final = (
    "error", "exception", "what()", "terminate", "abort", "fatal", "killed", "lost", "closed", "reset", "shutdown",
    "pipe", "peer", "barrier", "exited", "timeout", "timed out", "refused", "stuck", "rank", "memory", "space",
    "quota", "assert", "mismatch", "truncated", "enforce", "uncorrectable", "nccl", "corrupt", "free()", "malloc()",
    "smashing", "unexpected", "route", "unreachable",
)  # fmt: skip
"""Every line that the patterns match has one of these, in lower case: cheap, for a flood of lines that have none."""
_NOISE = re.compile(
    # frames of C++: c10's, and those that Python 3.14 prints
    r"^(\[rank\d+\]: ?)?(frame #\d+: |Exception raised from |  Binary file \")"
    # faulthandler (its frames, unlike a traceback's, have no comma after the line)
    r"|^(Thread|Current thread) 0x[0-9a-f]+|^  File \".*\", line \d+ in |^  <no Python frame>|^Extension modules: "
    r"|^Current thread's C stack trace|^  (\.\.\.|<cannot|<truncated)"
    # NCCL_DEBUG=INFO
    r"|NCCL INFO "
    # what a killed process has left in shared memory, as Python finds it afterwards
    r"|/multiprocessing/resource_tracker\.py:\d{1,6}: UserWarning: |^  warnings\.warn\("
)


def peer_lost(text: str) -> bool:
    """Whether an error only says that another rank went away, or did not come in time."""
    if _FROM_OUTSIDE.search(text) is not None:
        return False
    return _PEER_LOST.search(text) is not None and _DEVICE_FAULT.search(text) is None


def timed_out(text: str) -> bool:
    """Whether a collective waited in vain for a rank that was there."""
    return _TIMED_OUT.search(text) is not None


def device_fault(text: str) -> bool:
    """Whether a GPU, its driver or its memory is what failed."""
    return _DEVICE_FAULT.search(text) is not None


def no_rendezvous(text: str) -> bool:
    """Whether the ranks did not find each other."""
    return _NO_RENDEZVOUS.search(text) is not None and "store->get(" not in text


def no_memory(text: str) -> bool:
    """Whether the device, or the host, had too little memory."""
    return _NO_MEMORY.search(text) is not None


def no_space(text: str) -> bool:
    """Whether a volume is full."""
    return _NO_SPACE.search(text) is not None


def is_noise(line: str) -> bool:
    """Whether a line of stderr is part of a dump that says where a process was and not why it ended."""
    return _NOISE.search(line) is not None


def is_telling(line: str) -> bool:
    """Whether a line of stderr may say why the process is about to end. A warning does not."""
    lower = line.lower()
    if not any(word in lower for word in _WORDS) or _WARNING.search(line) or is_noise(line):
        return False
    return any(pattern.search(line) for pattern in (_TELLING, _PEER_LOST, _OWN_FAULT, _NO_MEMORY, _NO_SPACE))


def crash_lost_peer(lines: Iterable[str]) -> bool:
    """Whether the lines before a crash blame another rank.

    The first that blames something decides: NCCL's watchdog repeats it in other words, and aborts the process. Words
    such as "connection reset" count only if they come from torch's distributed package: a download says them too.
    """
    rest = [line for line in lines if not (_WARNING.search(line) or is_noise(line))]
    for number, line in enumerate(rest):
        if _FROM_RANKS.search(line) and peer_lost(line):
            return True
        if _OWN_FAULT.search(line):
            is_nccl = _SAYS_LATER.search(line) is not None and _DEVICE_FAULT.search(line) is None
            return is_nccl and any(_LOST_OVER_EFA.search(later) for later in rest[number:])
    return False


DUMP_FRAMES: Final = 3
"""Frames of the crashing thread that are worth keeping."""
_FRAME = re.compile(r"^  File \"(?P<file>.*)\", line \d+ in ")


class LineFilter:
    """Picks the lines that are worth keeping from a stream: all but noise, and of a dump the innermost frames of the
    thread that crashed.
    """

    def __init__(self) -> None:
        self._frames_left = 0
        self._in_current = False

    def keeps(self, line: str) -> bool:
        """Whether to keep `line`, the next of the stream, without its line break."""
        if line.startswith("Current thread 0x"):
            self._in_current, self._frames_left = True, DUMP_FRAMES
            return False
        if not is_noise(line):
            self._in_current = False
            return bool(line.strip())
        frame = _FRAME.match(line)
        if not self._in_current or frame is None or not self._frames_left:
            return False
        foreign = any(
            part in frame["file"] for part in ("site-packages", "/lib/python", "<frozen", "ddp_trainer/rank/")
        )
        if foreign and self._frames_left < DUMP_FRAMES:
            return False
        self._frames_left -= 1
        return True
