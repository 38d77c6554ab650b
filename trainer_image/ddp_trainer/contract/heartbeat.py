"""The heartbeat: the state of each rank, in one small file a rank.

A rank that hangs in a collective cannot answer a request, so it is never asked: it leaves its last known
state in `$DDPJOB_RUN_DIR/heartbeats/rank-<RANK>.json` (docs/contracts.md section 4) and the launcher reads how
old that is. Writing costs a rename on a memory-backed directory, at most four times a second, after a hundred seconds
once a second, and once a change of phase; a disk that fails never fails training, and on a full one the file is
overwritten in place. The number of the last step is in a file of its own, written in every step: a rank that crashes
has reported where, and the same crash at the same step is known as the same.

    heartbeat = Heartbeat.from_env()
    heartbeat.enter("train")
    for step, batch in enumerate(loader, start=1):
        loss = train(batch)
        heartbeat.step(step=step, total_steps=len(loader), loss=loss)
    heartbeat.enter("done")

Under no launcher (DDPJOB_RUN_DIR unset) the same calls do nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ddp_trainer.contract.environment import parse_rank
from ddp_trainer.contract.histograms import nothing_observed, observe
from ddp_trainer.contract.json_files import read_json, write_json
from ddp_trainer.contract.last_step import LastStep, read_last_step

VERSION: Final = 1
PHASES: Final = ("init", "script", "rendezvous", "load", "first_step", "train", "validate", "save", "done")
WRITE_INTERVAL_SECONDS: Final = 0.25
FULL_RATE_SECONDS: Final = 25.0
LONGEST_INTERVAL: Final = 4
"""After so many seconds the interval grows with the run, to so many times its length: a longer run is judged by longer
times.
"""
DEVICE_LOSS_INTERVAL_SECONDS: Final = 1.0
"""Reading a loss off an accelerator waits for everything queued before it, so it happens less often."""
ROOM_BYTES: Final = 8192
"""Size of the file: with metrics of the script's own it may grow after the memory-backed directory is full."""
STEP_WINDOW: Final = 512
"""Steps that the p99 and the medians are taken over."""
PASSES_WINDOW: Final = 5
"""The same of forward and backward passes, of which few are measured."""

_pid = os.getpid()
"""Asked for once: in each step it would be a system call."""


def _read_pid() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_read_pid)


class Heartbeat:
    """The writer of one rank's heartbeat file; a thread that saves snapshots may call it too.

    `directory` is where the file goes, None for nowhere. `clock` is monotonic seconds of this host, the same
    in every process of it. `observed` says that the script does not report itself (`rank.observe`), `own_loop`
    that it reports its steps and maybe not what it does between them (`attach`).
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        rank: int = 0,
        local_rank: int = 0,
        observed: bool = False,
        own_loop: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self._path = directory / f"rank-{rank}.json" if directory is not None else None
        self._last_step = LastStep(self._path.with_suffix(".step")) if self._path is not None else None
        self._clock = clock
        self._lock = threading.RLock()
        self._began_at = clock()
        self._due_at = -math.inf
        self._loss: Any = None
        self._shown_loss: float | None = None
        self._loss_of_step: float | None = None
        self._loss_read_at = -math.inf
        self._step_at: float | None = None
        self._steps: list[tuple[float, int, int | None, float | None]] = []
        """Steps since the last write: when, number, samples, seconds."""
        self._of_step: tuple[int | None, int | None, float | None, float | None] | None = None
        """Epoch, total, samples per second and learning rate of the newest one."""
        self._intervals: deque[float] = deque(maxlen=STEP_WINDOW)
        self._waits: list[float] = []
        """For data since the last write, in seconds."""
        self._data_waits: deque[float] = deque(maxlen=STEP_WINDOW)
        self._passes: deque[float] = deque(maxlen=PASSES_WINDOW)
        self._state: dict[str, Any] = {
            "version": VERSION,
            "rank": rank,
            "localRank": local_rank,
            "pid": _pid,
            "observed": observed,
            "ownLoop": own_loop,
            "time": clock(),
            "phase": "init",
            "phaseTime": clock(),
            "phaseSeconds": {},
            "epoch": None,
            "step": None,
            "totalSteps": None,
            "samples": None,
            "loss": None,
            "nonFiniteLoss": None,
            "samplesPerSecond": None,
            "learningRate": None,
            "stepSeconds": None,
            "stepSecondsP99": None,
            "stepSecondsMedian": None,
            "dataSecondsMedian": None,
            "passesSecondsMedian": None,
            "snapshot": None,
            "saveSeconds": None,
            "snapshotInterval": None,
            "snapshotProblem": None,
            "snapshotsSetAside": [],
            "resumedFromStep": None,
            "metrics": {},
            "live": None,
            "counters": {
                "steps": 0,
                "samples": 0,
                "outOfMemory": 0,
                "nonFiniteLosses": 0,
                "skippedSteps": {},
                "saves": {},
                "stepSeconds": nothing_observed(),
                "stallSeconds": nothing_observed(),
                "saveSeconds": nothing_observed(),
            },
        }

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, *, observed: bool = False) -> Heartbeat:
        """The heartbeat of this rank, from DDPJOB_RUN_DIR (silent without it), RANK and LOCAL_RANK."""
        own = parse_rank(os.environ if environ is None else environ)
        directory = heartbeat_dir(own.run_dir) if own.run_dir else None
        return cls(directory, rank=own.rank, local_rank=own.local_rank, observed=observed)

    @property
    def loss(self) -> float | None:
        """The last loss that was read, or is shown in the place of it: not each one is."""
        loss: float | None = self._state["loss"]
        return loss

    @property
    def loss_of_step(self) -> float | None:
        """The last one that was read, whatever is shown."""
        return self._loss_of_step

    @property
    def phase(self) -> str:
        """What it is in, one of PHASES."""
        phase: str = self._state["phase"]
        return phase

    def enter(self, phase: str) -> None:
        """Say what begins now, one of PHASES; written at once when it differs from the phase before."""
        if phase not in PHASES:
            raise ValueError(f"heartbeat phase {phase!r} is not one of {', '.join(PHASES)}")
        with self._lock:
            now = self._progress()
            if phase != self._state["phase"]:
                left, seconds = self._state["phase"], self._state["phaseSeconds"]
                seconds[left] = seconds.get(left, 0.0) + now - self._state["phaseTime"]
                self._state.update(phase=phase, phaseTime=now)
                # The time a save or a validation took is no step time.
                self._step_at = None
                self.flush()
            else:
                self._flush_if_due(now)

    def beat(self) -> None:
        """Still alive in the same phase, for instance once a validation batch."""
        with self._lock:
            self._flush_if_due(self._progress())

    def step(
        self,
        *,
        step: int,
        epoch: int | None = None,
        total_steps: int | None = None,
        samples: int | None = None,
        loss: Any = None,
        shown_loss: float | None = None,
        samples_per_second: float | None = None,
        learning_rate: float | None = None,
        step_seconds: float | None = None,
    ) -> None:
        """One optimizer step is done: `step` in the whole run, on `samples` samples by all ranks together.

        `loss` is a number or a one-element tensor of any device; it is only read when a write is due. `shown_loss` is
        written in its place. `step_seconds` is measured between calls where it is not given. All but the number of the
        step is reckoned when a write is due: beside a step, code that is in no cache takes several times as long.
        """
        with self._lock:
            now = self._clock()
            self._steps.append((now, step, samples, step_seconds))
            if loss is not None:
                # detached, or the last loss would keep its whole graph alive
                self._loss = loss.detach() if getattr(loss, "requires_grad", False) else loss
            self._shown_loss = shown_loss
            self._of_step = (epoch, total_steps, samples_per_second, learning_rate)
            if self._last_step is not None:
                self._last_step.write(_pid, step)
            # the first step is news, and from the second on the watchdog can tell slow from hung
            if not self._intervals:
                self.flush()
            else:
                self._flush_if_due(now)

    def forgets_loss(self) -> None:
        """What was trained before in this process is over: what its loss was says nothing of the steps that follow."""
        with self._lock:
            self._loss = self._shown_loss = self._loss_of_step = self._state["loss"] = None
            self._state["nonFiniteLoss"] = None

    def last_loss_is(self, loss: float | None) -> None:
        """Training is done, or stops: the loss of its last step, which comes after the step; written with what comes
        next. None where nobody has said one.
        """
        if loss is not None:
            with self._lock:
                self._loss, self._shown_loss = loss, None

    def epochs_are(self, finished: int) -> None:
        """Training is done, and so many epochs are; written with what comes next."""
        with self._lock:
            self._reckon()  # or the last step would put its own epoch in the place of it
            self._state["epoch"] = finished

    def waited_for_data(self, seconds: float) -> None:
        """The next step has waited so long for its samples."""
        with self._lock:
            self._waits.append(seconds)

    def skipped_steps(self, cause: str, steps: int = 1) -> None:
        """So many steps have updated nothing, because of `cause`. With 0: such steps will be counted."""
        with self._lock:
            counts = self._state["counters"]["skippedSteps"]
            counts[cause] = counts.get(cause, 0) + steps

    def passes_took(self, seconds: float) -> None:
        """Forward and backward passes of a step have taken this rank so long, its waits for other ranks left out."""
        with self._lock:
            self._passes.append(seconds)

    def snapshot(
        self,
        step: int | None = None,
        time: float | None = None,
        verified: bool = False,
        *,
        size: int | None = None,
        stall_seconds: float | None = None,
        save_seconds: float | None = None,
        result: str | None = None,
        interval: Mapping[str, Any] | None = None,
        problem: Mapping[str, Any] | None = None,
        set_aside: Mapping[str, Any] | None = None,
    ) -> None:
        """A snapshot of `step` exists since `time` (epoch seconds); `verified` once its checksums matched. `size` is
        the bytes of its files, if they are known.

        Call it on every rank: each node's launcher reports it. `result` counts a save: "saved", "failed"
        or "skipped"; without a `step` only the count and the durations change. `stall_seconds` is how long
        training stood still for it, `save_seconds` how long it took to be safe. `interval` is what `auto` has
        chosen and from what, `problem` why there is no snapshot of some step; a later one that is saved ends
        it; `set_aside` is one that did not verify. It does not count as progress: a thread that saves goes on when the
        one that trains hangs.
        """
        with self._lock:
            counters = self._state["counters"]
            if step is not None:
                self._state["snapshot"] = {"step": step, "time": time, "verified": verified, "bytes": size}
            if result is not None:
                counters["saves"][result] = counters["saves"].get(result, 0) + 1
                self._state["snapshotProblem"] = dict(problem) if problem else None
            if interval is not None:
                self._state["snapshotInterval"] = dict(interval)
            if set_aside is not None:
                self._state["snapshotsSetAside"].append(dict(set_aside))
            if stall_seconds is not None:
                observe(counters["stallSeconds"], stall_seconds)
            if save_seconds is not None:
                observe(counters["saveSeconds"], save_seconds)
                self._state["saveSeconds"] = save_seconds + (stall_seconds or 0.0)
            self.flush()

    def non_finite_loss(self, step: int | None) -> None:
        """The loss of `step` is NaN or infinite; None once it is finite again."""
        with self._lock:
            before = self._state["nonFiniteLoss"]
            if step is None:
                self._state["nonFiniteLoss"] = None
            else:
                self._state["counters"]["nonFiniteLosses"] += 1
                first = step if before is None else before["step"]
                self._state["nonFiniteLoss"] = {"step": first, "steps": 1 if before is None else before["steps"] + 1}
            if (before is None) != (step is None):
                self.flush()

    def seconds(self) -> dict[str, float]:
        """Seconds in each phase until now, as `phase_seconds` has them."""
        with self._lock:
            now = self._clock()
            return phase_seconds(self._state | {"time": now}, now)

    def goes_on_after(self, seconds: Mapping[str, float]) -> None:
        """This process goes on in the place of another one of this attempt: `seconds` are those of a rank that was
        there all the time. What this one has spent on its way passed beside them.
        """
        with self._lock:
            now = self._progress()
            self._state.update(phaseSeconds=dict(seconds), phaseTime=now)
            self.flush()

    def recovers_live(self, ranks: int, costs: Mapping[str, Any]) -> None:
        """`ranks` train now, and live recovery has cost this so far (`live.costs`), by earlier processes too."""
        with self._lock:
            self._state["live"] = {"ranks": ranks, "last": costs["last"]}
            self._state["counters"].update(recoverySeconds=costs["seconds"], droppedSteps=costs["droppedSteps"])
            self.flush()

    def out_of_memory(self, micro_batch: int) -> None:
        """Some rank had too little memory: from here on all take micro-batches of at most so many samples."""
        with self._lock:
            self._state["counters"]["outOfMemory"] += 1
            self.metrics(micro_batch=micro_batch)

    def metrics(self, **values: float) -> None:
        """Merge measured values, such as eval_accuracy=0.96, into what is reported. A new name is written at once, a
        new value of a known one when a write is due.
        """
        with self._lock:
            now = self._progress()
            is_news = not values.keys() <= self._state["metrics"].keys()
            self._state["metrics"].update({name: float(value) for name, value in values.items()})
            if is_news:
                self.flush()
            else:
                self._flush_if_due(now)

    def resumed(self, step: int, samples: int | None = None, *, resumed_from: int | None = None) -> None:
        """Training goes on after `step` steps and `samples` samples; 0 is a new run. The steps after `resumed_from`, by
        default none, are of this attempt: other ranks have made them, and go on.
        """
        with self._lock:
            self._progress()
            self._state.update(resumedFromStep=step if resumed_from is None else resumed_from, step=step)
            if self._last_step is not None:
                self._last_step.write(_pid, step)
            if samples is not None:
                self._state["samples"] = samples
            self.flush()

    def flush(self) -> None:
        """Write what is known. A file system that refuses is ignored: the next write tries again."""
        with self._lock:
            self._reckon()
            if self._path is None:
                return
            now = self._clock()
            so_far = (now - self._began_at) / FULL_RATE_SECONDS
            self._due_at = now + WRITE_INTERVAL_SECONDS * min(max(1.0, so_far), LONGEST_INTERVAL)
            self._read_loss(now)
            if self._intervals:
                ordered = sorted(self._intervals)
                self._state["stepSecondsP99"] = ordered[math.ceil(0.99 * len(ordered)) - 1]
                self._state["stepSecondsMedian"] = ordered[len(ordered) // 2]
            if self._data_waits:
                self._state["dataSecondsMedian"] = sorted(self._data_waits)[len(self._data_waits) // 2]
            if self._passes:
                self._state["passesSecondsMedian"] = sorted(self._passes)[len(self._passes) // 2]
            with contextlib.suppress(OSError):
                write_json(self._path, self._state, room=ROOM_BYTES)

    def _progress(self) -> float:
        self._reckon()
        now = self._clock()
        self._state["time"] = now
        return now

    def _reckon(self) -> None:
        """Put the steps since the last write, and the waits for their data, into the state."""
        if self._waits:
            # no histogram where nobody measures: it would say that no step ever waits
            histogram = self._state["counters"].setdefault("dataSeconds", nothing_observed())
            for waited in self._waits:
                observe(histogram, waited)
            self._data_waits.extend(self._waits)
            self._waits.clear()
        if not self._steps:
            return
        for now, step, samples, seconds in self._steps:
            interval = None if self._step_at is None else now - self._step_at
            if interval is not None:
                self._intervals.append(interval)
            self._count(step, samples, interval if seconds is None else seconds)
            self._step_at = now
        self._state["time"] = self._step_at
        self._steps.clear()
        if self._of_step is not None:
            names = ("epoch", "totalSteps", "samplesPerSecond", "learningRate")
            given = zip(names, self._of_step, strict=True)
            self._state.update((name, value) for name, value in given if value is not None)
            self._of_step = None

    def _flush_if_due(self, now: float) -> None:
        if now >= self._due_at:
            self.flush()

    def _count(self, step: int, samples: int | None, seconds: float | None) -> None:
        state, counters = self._state, self._state["counters"]
        if seconds is not None:
            observe(counters["stepSeconds"], seconds)
            state["stepSeconds"] = seconds
        if samples is not None:
            # the first step of a script that never said where it resumed counts as an average one
            before = samples - samples // max(step, 1) if state["samples"] is None else state["samples"]
            counters["samples"] += max(0, samples - before)
            state["samples"] = samples
        counters["steps"] += 1 if state["step"] is None else max(0, step - state["step"])
        state["step"] = step

    def _read_loss(self, now: float) -> None:
        if self._shown_loss is not None:
            self._state["loss"] = self._shown_loss
        loss = self._loss
        if loss is None:
            return
        device = getattr(loss, "device", None)
        on_cpu = device is None or device.type == "cpu"
        if not on_cpu and (now - self._loss_read_at < DEVICE_LOSS_INTERVAL_SECONDS or is_capturing()):
            return
        self._loss_of_step = float(loss)
        if self._shown_loss is None:
            self._state["loss"] = self._loss_of_step
        self._loss, self._loss_read_at = None, now


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the present stream; to read from the device would end that with an
    error. Without importing torch.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and cuda.is_initialized() and bool(cuda.is_current_stream_capturing())


def heartbeat_dir(run_dir: Path) -> Path:
    """Where the ranks of the pod with this DDPJOB_RUN_DIR leave their heartbeats."""
    return run_dir / "heartbeats"


def read_heartbeats(run_dir: Path) -> list[dict[str, Any]]:
    """The newest heartbeat of every rank of this pod, by rank; files of another version are skipped."""
    heartbeats = []
    for path in heartbeat_dir(run_dir).glob("rank-*.json"):
        found = read_json(path)
        if found is not None and found.get("version") == VERSION and isinstance(found.get("rank"), int):
            step = read_last_step(path.with_suffix(".step"), found["pid"])
            heartbeats.append(found if step is None else found | {"step": max(step, found["step"] or 0)})
    return sorted(heartbeats, key=lambda heartbeat: heartbeat["rank"])


def phase_seconds(heartbeat: Mapping[str, Any] | None, now: float) -> dict[str, float]:
    """Seconds that a rank has spent in each phase of this attempt, up to its last heartbeat.

    Time that training stood still for a snapshot counts as `save`, not as `train`.
    """
    if heartbeat is None:
        return {}
    seconds = dict(heartbeat.get("phaseSeconds", {}))
    seconds[heartbeat["phase"]] = seconds.get(heartbeat["phase"], 0.0) + max(
        0.0, min(now, heartbeat["time"]) - heartbeat["phaseTime"]
    )
    stood = min(heartbeat["counters"]["stallSeconds"]["sum"], seconds.get("train", 0.0))
    if stood:
        seconds["train"] -= stood
        seconds["save"] = seconds.get("save", 0.0) + stood
    return {phase: round(spent, 3) for phase, spent in seconds.items()}
