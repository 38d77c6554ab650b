"""CPU time, memory and GPUs of the pod's container, read when `/metrics` is scraped, and what its CPU limit costs.

The container's control group has all but the GPUs: its own accounts, whatever else runs on the node. NVML has the GPUs,
where the image has its Python bindings (`ddpjob[gpu]`, in the image with CUDA); without them there are no such series.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

UNLIMITED: Final = 2**60
"""Version 1 of control groups says of memory without a limit: the largest multiple of a page in 63 bits."""

THROTTLING_SECONDS: Final = 5.0
"""Between two looks at what the CPU limit does."""

THROTTLING_LOOKS: Final = 13
"""Those of a minute."""

GPU_SECONDS: Final = 0.5
"""How long a scrape waits for NVML: the driver of a broken GPU may never answer."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a control group; None where it is not known, or there is no limit."""

    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    """Without the page cache that can be dropped at once, as the kubelet counts it."""
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Throttling:
    """What the CPU limit of a control group did in some time: the kernel lets it run in periods, mostly of 100 ms, and
    stops it until the end of one in which it has used up its share.
    """

    seconds: float
    """How long that time was."""
    periods: int
    """In which it ran."""
    throttled_periods: int
    """In which it was stopped."""
    throttled_seconds: float
    """How long it was stopped, added up over the CPUs."""


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU by its number in this container. None where the GPU does not say, as a MIG slice does not."""

    index: int
    utilization: float | None
    """Share of the last second or less in which a kernel ran, 0 to 1."""
    memory_bytes: int | None
    memory_limit_bytes: int | None


def usage(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Usage:
    """What this container has used. Raises nothing: without control groups nothing is known."""
    paths = _own_paths(own)
    if (root / "cgroup.controllers").exists():
        group = _group(root, paths.get("", "/"))
        cpu, memory = _fields(group / "cpu.stat").get("usage_usec"), group
        seconds = None if cpu is None else cpu / 1e6
        used, limit, dropped = "memory.current", "memory.max", "inactive_file"
    else:
        cpu = _number(_group(root / "cpuacct", paths.get("cpuacct", "/")) / "cpuacct.usage")
        seconds = None if cpu is None else cpu / 1e9
        memory = _group(root / "memory", paths.get("memory", "/"))
        used, limit, dropped = "memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"
    most, held = _number(memory / limit), _number(memory / used)
    if held is not None:
        held = max(0, held - _fields(memory / "memory.stat").get(dropped, 0))
    return Usage(seconds, held, most if most is not None and most < UNLIMITED else None)


class ThrottlingWatch:
    """`look` often; `lately` is of the last minute, or since the first look."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> None:
        self._root, self._own = root, own
        self._looks: deque[tuple[float, tuple[int, int, float]]] = deque(maxlen=THROTTLING_LOOKS)
        self.lately: Throttling | None = None
        """None where there is no limit, or nothing is known yet."""

    def look(self, now: float) -> None:
        """Read the counters, unless that was a moment ago. `now` is monotonic seconds."""
        if self._looks and now - self._looks[-1][0] < THROTTLING_SECONDS:
            return
        counters = _throttled(self._root, self._own)
        if counters is None:
            return
        self._looks.append((now, counters))
        began, before = self._looks[0]
        periods, stopped, seconds = (after - first for after, first in zip(counters, before, strict=True))
        # without a limit no period is counted
        self.lately = Throttling(now - began, int(periods), int(stopped), seconds) if periods > 0 else None


class GPUs:
    """Asks NVML, in a thread of its own."""

    def __init__(self, load: Callable[[], Any] | None = None) -> None:
        """`load` returns the module pynvml, or raises."""
        self._load = load or _pynvml
        self._nvml: Any = None
        self._is_lost = False
        self._thread: threading.Thread | None = None
        self._found: Sequence[GPU] = ()

    def look(self) -> Sequence[GPU]:
        """The GPUs now; none where NVML is not there, or has not answered in time."""
        if self._is_lost or (self._thread is not None and self._thread.is_alive()):
            return ()
        self._thread = threading.Thread(target=self._ask, name="nvml", daemon=True)
        self._thread.start()
        self._thread.join(GPU_SECONDS)
        return () if self._thread.is_alive() else self._found

    def _ask(self) -> None:
        try:
            if self._nvml is None:
                nvml = self._load()
                nvml.nvmlInit()
                self._nvml = nvml
            self._found = [self._one(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        except Exception:  # no bindings, no driver, no GPU
            self._is_lost, self._found = True, ()

    def _one(self, index: int) -> GPU:
        nvml = self._nvml
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError:  # lost, as one that has fallen off the bus: the others still answer
            return GPU(index, None, None, None)
        utilization = memory = None
        with contextlib.suppress(nvml.NVMLError):
            utilization = nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(device)
        except nvml.NVMLError:
            return GPU(index, utilization, None, None)
        return GPU(index, utilization, memory.used, memory.total)


def _pynvml() -> Any:
    return importlib.import_module("pynvml")


def _throttled(root: Path, own: Path) -> tuple[int, int, float] | None:
    """Periods, those in which the group was stopped, and seconds for which it was, since there is the group."""
    paths = _own_paths(own)
    if (root / "cgroup.controllers").exists():
        found, unit = _fields(_group(root, paths.get("", "/")) / "cpu.stat"), ("throttled_usec", 1e6)
    else:
        found, unit = _fields(_group(root / "cpu", paths.get("cpu", "/")) / "cpu.stat"), ("throttled_time", 1e9)
    name, second = unit
    if not {"nr_periods", "nr_throttled", name} <= found.keys():
        return None
    return found["nr_periods"], found["nr_throttled"], found[name] / second


def _own_paths(file: Path) -> Mapping[str, str]:
    """Path of this process's group by controller; that of version 2 by an empty name."""
    found: dict[str, str] = {}
    for line in _lines(file):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _group(root: Path, path: str) -> Path:
    """A container of version 1 reads the path that its group has on the node, which it does not see: it sees its own
    group at the root.
    """
    directory = root / path.strip("/")
    return directory if directory.is_dir() else root


def _fields(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(file))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(file: Path) -> int | None:
    text = next(_lines(file), "")
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> Iterator[str]:
    try:
        yield from file.read_text().splitlines()
    except OSError:
        return
