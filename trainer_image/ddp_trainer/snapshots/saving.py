"""Saving: stage the states, write them in the background, and report how the save before ended.

Every rank has a Saver and makes the same calls. Rank 0's owns the directory and writes the replicated states, which all
ranks hold alike; where states are sharded, each rank stages and writes its own part, led by rank 0. Hashing, writing
and fsync release the interpreter's lock, so training goes on beside them.

A save that fails or takes long is an event, never an exception: training is worth more than any one snapshot. The one
exception is being fenced, after which training here is worth nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, get_args

from torch import Tensor

from ddp_trainer.contract.exit_codes import FencedError
from ddp_trainer.rank.storage_waits import storage_awaited
from ddp_trainer.snapshots.boundary import Boundaries, Boundary, as_of
from ddp_trainer.snapshots.codec.state import RNG, Staged, Staging, Stateful
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.rounds import ROUND_SECONDS
from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.manifest import FileEntry, Kind, Manifest
from ddp_trainer.snapshots.trust.store import SnapshotStore
from ddp_trainer.snapshots.values import FAILING_AFTER, Progress, SnapshotEvent

if TYPE_CHECKING:
    from ddp_trainer.snapshots.sharded import Shards, StagedShard

log = logging.getLogger(__name__)

Ready = Literal["begin", "saved", "skipped"]
READY: Final[tuple[Ready, ...]] = get_args(Ready)

PATIENCE_SECONDS = 1.0
"""A save in flight for less than this is waited for when the next is due; a slower one makes the next be skipped."""

SLOWEST_BYTES_PER_SECOND = 50e6
"""A save of more bytes than this writes in `timeout` may take longer. Rank 0 alone reads back all shards."""

EMERGENCY_SECONDS = 20.0
"""How long an emergency snapshot may take: torchrun kills what is left of a failed job 30 seconds after the failure."""

GENERATORS_TIMEOUT = timedelta(seconds=5)
"""How long rank 0 waits, after a failure, for what the other ranks sent at the end of the last step."""


class Saver:
    """Saves `stateful`, replicated, and `shards`; one save in flight.

    `store` is None on all ranks but rank 0. `on_event` gets events, always on the calling thread.
    """

    def __init__(
        self,
        stateful: Mapping[str, Stateful],
        shards: Shards | None,
        ranks: Ranks,
        store: SnapshotStore | None,
        on_event: Callable[[SnapshotEvent], None],
        *,
        last_saved: Manifest | None,
        timeout: float,
    ) -> None:
        self.last_saved = last_saved
        """The newest snapshot known to be whole: the one resumed from, or on rank 0 the last one saved since."""
        self._stateful = stateful
        self._shards = shards
        self._ranks = ranks
        self._store = store
        self._emit = on_event
        self._timeout = timeout
        self._staging = Staging()
        self._writer = BackgroundWriter()
        self._step_in_flight: int | None = None
        self._bytes_in_flight = 0
        self._failures = 0

    def save(self, manifest: Manifest, generators: Tensor | None, *, started: float, wait: bool) -> bool:
        """Stage the present states and have them written, on all ranks alike; True if a save is under way.

        `generators` are those of all ranks, uint8 [world size, bytes], on rank 0; `started` is the monotonic time at
        which training stopped. With `wait`, every rank returns when rank 0's files are on the disk, True if they are.
        Raises FencedError.
        """
        fenced: FencedError | None = None
        if wait:
            with self._together():
                self._await_writer(self._limit)
        try:
            ready: Ready = "begin" if self._store is None else self._ready(manifest.step, manifest.kind, wait=wait)
        except FencedError as error:
            ready, fenced = "skipped", error
        if self._shards is not None:
            with self._together():
                (index,) = self._ranks.numbers_from_first(READY.index(ready))
            ready = READY[index]
        saving = ready != "skipped"
        if ready == "begin":
            saving = self._begin(manifest, generators, started)
        if wait:
            return self._finished(manifest.step, saving, fenced)
        if fenced is not None:
            raise fenced
        return saving

    def emergency(self, boundaries: Boundaries, manifest: Callable[[Progress], Manifest]) -> bool:
        """On rank 0, after an exception that ends training: save the newest boundary, if the states are still those of
        it, with what `manifest` makes for its end. That may fail as the step did: it looks at weights on a device.

        Needs no other rank: they may be gone. True if the last finished step is saved; where it cannot be, an event
        says why. Raises nothing, and takes up to a minute if the volume hangs.
        """
        if self._store is None:
            return False
        boundary = boundaries.newest
        step = boundary.progress.step if boundary is not None else 0
        try:
            if boundaries.obstacle is not None:
                self._wait_for(step, EMERGENCY_SECONDS)
                raise SnapshotError(boundaries.obstacle)
            return boundary is not None and self._save_boundary(boundary, boundaries, manifest)
        except Exception as error:
            self._give_up(step, str(error) or type(error).__name__)
            return False

    def collect(self) -> None:
        """Report how a save that is over has ended. Raises FencedError."""
        outcome = self._writer.take()
        if outcome is None or self._store is None:
            return
        self._step_in_flight = None
        if isinstance(outcome.error, FencedError):
            raise outcome.error
        if outcome.manifest is None:
            self._failed(outcome)
            return
        self._failures = 0
        self.last_saved = outcome.manifest
        kind = "emergency snapshot" if outcome.manifest.kind == "emergency" else "snapshot"
        message = (
            f"{kind} of step {outcome.step} saved in {outcome.seconds:.2f} s, "
            f"training stopped for {outcome.stall_seconds:.3f} s"
        )
        self._emit(
            SnapshotEvent("saved", outcome.step, message, outcome.manifest, outcome.stall_seconds, outcome.seconds)
        )

    def has(self, step: int) -> bool:
        """On rank 0: whether this step is saved, or a save of it is under way."""
        return step in (self._saved_step(), self._step_in_flight)

    def lead(self, store: SnapshotStore | None) -> None:
        """This rank is rank 0 now, and owns the directory; or it is not any more."""
        self._store = store

    def close(self) -> None:
        """Wait for the save in flight and report how it ended; raises nothing."""
        limit = self._limit
        is_over = self._writer.wait(limit)
        if self._store is None:
            return
        if not is_over:
            hung = TimeoutError(
                f"snapshot of step {self._step_in_flight} not written within {limit:.0f} s: the volume hangs"
            )
            self._failed(Outcome(self._step_in_flight or 0, self._writer.busy_seconds, 0.0, error=hung))
            return
        try:
            self.collect()
        except FencedError as error:
            log.warning("%s", error)

    # A save, step by step

    @property
    def _limit(self) -> float:
        """How many seconds the save in flight may take until its volume is taken for hung."""
        return max(self._timeout, self._bytes_in_flight / SLOWEST_BYTES_PER_SECOND)

    def _together(self) -> AbstractContextManager[None]:
        return nullcontext() if self._shards is None else self._shards.together()

    def _await_writer(self, limit: float) -> None:
        """On all ranks alike: wait until rank 0's writer is through, rank 0's `limit` seconds at most.

        Raises RuntimeError where another rank is lost; rank 0 after its wait, since its files may need no other rank.
        """
        deadline = time.monotonic() + limit
        is_over = False
        while not is_over:
            left = max(0.0, deadline - time.monotonic())
            is_over = self._store is None or self._writer.wait(min(left, ROUND_SECONDS)) or left <= ROUND_SECONDS
            try:
                (number,) = self._ranks.numbers_from_first(int(is_over))
            except RuntimeError:
                if self._store is not None:
                    self._writer.wait(max(0.0, deadline - time.monotonic()))
                raise
            is_over = bool(number)

    def _ready(self, step: int, kind: Kind, *, wait: bool) -> Ready:
        """On rank 0: whether to begin this save, or whether it is done or under way already, or must be skipped."""
        self.collect()
        if step == self._saved_step() or (step == self._step_in_flight and not wait):
            return "saved"
        patience = EMERGENCY_SECONDS if kind == "emergency" else self._limit
        if kind != "emergency" and wait:
            patience = 0.0  # all ranks have waited for it
        elif kind == "periodic":
            patience = PATIENCE_SECONDS - self._writer.busy_seconds
        self._writer.wait(max(0.0, patience))
        self.collect()
        if self._writer.busy:
            self._skipped(step)
            return "skipped"
        return "saved" if step == self._saved_step() else "begin"

    def _begin(
        self, manifest: Manifest, generators: Tensor | None, started: float, boundary: Boundary | None = None
    ) -> bool:
        """Stage this rank's part and start writing it; False if it cannot be staged, on all ranks alike if sharded."""
        shard: StagedShard | None = None
        if self._shards is not None and self._ranks.rank < self._shards.size:
            try:
                shard = self._shards.stage(self._unfinished())
            except SnapshotError as error:
                self._not_staged(manifest, error, started)
                return False
        staged: Staged | None = None
        if self._store is not None:
            try:
                states = {name: value.state_dict() for name, value in self._stateful.items()}
                if boundary is not None:
                    states = as_of(boundary, states)
                staged = self._staging.stage({**states, RNG: {"ranks": generators}})
            except Exception as error:
                if self._shards is not None:
                    self._shards.dismiss()
                self._not_staged(manifest, error, started)
                return False
        stall = time.monotonic() - started
        if staged is not None:
            self._step_in_flight = manifest.step
            self._bytes_in_flight = staged.tensor_bytes + _bytes_of(shard)
            self._writer.start(manifest.step, stall, lambda: self._write(manifest, staged, shard))
        elif self._shards is not None and shard is not None:
            self._bytes_in_flight = shard.total_bytes
            follow = self._shards.follow
            self._writer.start(manifest.step, stall, lambda: follow(shard, Disk()))
        return True

    def _write(self, manifest: Manifest, staged: Staged, shard: StagedShard | None) -> Manifest:
        """In the background of rank 0."""
        store, shards = self._store, self._shards
        assert store is not None

        def write(directory: Path) -> dict[str, FileEntry]:
            files = staged.write(directory, store.disk)
            if shards is not None and shard is not None:
                files |= shards.lead(shard, directory, store.disk)
            return files

        try:
            return store.save(write, manifest, expected_bytes=staged.total_bytes + _bytes_of(shard))
        finally:
            if shards is not None and shard is not None:
                shards.dismiss()

    def _unfinished(self) -> SnapshotError | None:
        """Why this rank cannot stage: its thread still writes from the buffers that it would copy into."""
        busy = self._writer.busy_seconds
        # Rank 0 is through, so this rank is about to be, unless its disk hangs.
        if self._writer.wait(PATIENCE_SECONDS if busy < self._limit else 0.0):
            self._writer.take()
            return None
        return SnapshotError(
            f"its part of the snapshot before is still not written after {busy:.0f} s: the volume hangs there. The "
            "snapshots before it are intact and training goes on; check the volume's server and that node's network"
        )

    def _finished(self, step: int, saving: bool, fenced: FencedError | None) -> bool:
        """Wait for rank 0's files; every rank returns or raises as rank 0 does."""
        self._await_writer(self._limit if saving and fenced is None else 0.0)
        if self._store is not None and saving and fenced is None:
            try:
                saving = self._wait_for(step, 0.0)
            except FencedError as error:
                fenced = error
        is_fenced, is_saved = self._ranks.numbers_from_first(int(fenced is not None), int(saving))
        if is_fenced:
            raise fenced or FencedError(
                "rank 0 found that a newer attempt owns the job's directory; its message names it"
            )
        return bool(is_saved)

    def _save_boundary(
        self, boundary: Boundary, boundaries: Boundaries, manifest: Callable[[Progress], Manifest]
    ) -> bool:
        started, step = time.monotonic(), boundary.progress.step
        ready = self._ready(step, "emergency", wait=True)
        if ready != "begin":
            return ready == "saved"
        problem = boundaries.problem()
        if problem is not None:
            raise SnapshotError(problem)
        try:
            generators = boundary.generators.wait(GENERATORS_TIMEOUT)
        except RuntimeError as lost:
            raise SnapshotError(f"the random number state of another rank did not arrive ({lost})") from lost
        if not self._begin(manifest(boundary.progress), generators, started, boundary):
            return False
        return self._wait_for(step, EMERGENCY_SECONDS)

    def _wait_for(self, step: int, timeout: float) -> bool:
        """Wait for the save in flight; whether `step` is saved. Raises FencedError."""
        self._writer.wait(timeout)
        self.collect()
        return self._saved_step() == step

    def _saved_step(self) -> int | None:
        return self.last_saved.step if self.last_saved is not None else None

    # What is reported

    def _failed(self, outcome: Outcome) -> None:
        self._failures += 1
        message = str(outcome.error) or type(outcome.error).__name__
        if self._failures >= FAILING_AFTER:
            message = f"SnapshotsFailing: {self._failures} saves in a row have failed, the last with: {message}"
        self._emit(
            SnapshotEvent(
                "failed",
                outcome.step,
                message,
                stall_seconds=outcome.stall_seconds,
                save_seconds=outcome.seconds,
                failures=self._failures,
            )
        )

    def _not_staged(self, manifest: Manifest, error: Exception, started: float) -> None:
        if self._store is not None:
            self._failed(Outcome(manifest.step, 0.0, time.monotonic() - started, error=error))

    def _give_up(self, step: int, problem: str) -> None:
        """Report that there will be no emergency snapshot."""
        saved = self._saved_step()
        goes_on = "starts over" if saved is None else f"goes on from step {saved}"
        message = f"no emergency snapshot: {problem}. The next attempt {goes_on}"
        self._emit(SnapshotEvent("skipped", step, message))

    def _skipped(self, step: int) -> None:
        busy = self._writer.busy_seconds
        if busy > self._limit:
            hung = TimeoutError(
                f"no snapshot of step {step}: that of step {self._step_in_flight} is still not written after "
                f"{busy:.0f} s: the volume hangs. The snapshots before it are intact and training goes on; "
                "check the volume's server and its network"
            )
            self._failed(Outcome(step, busy, 0.0, error=hung))
            return
        message = (
            f"no snapshot of step {step}: that of step {self._step_in_flight} is still being written after "
            f"{busy:.1f} s; save less often or give the volume more speed"
        )
        self._emit(SnapshotEvent("skipped", step, message))


def _bytes_of(shard: StagedShard | None) -> int:
    return 0 if shard is None else shard.total_bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save ended. `error` is None if it went well, and on rank 0 `manifest` is then what was saved.

    `seconds` is the time the thread took.
    """

    step: int
    seconds: float
    stall_seconds: float
    manifest: Manifest | None = None
    error: Exception | None = None


class BackgroundWriter:
    """Runs one save at a time. All methods belong to the training thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._started = 0.0

    @property
    def busy(self) -> bool:
        """Whether a save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def busy_seconds(self) -> float:
        """How long the save in flight has taken so far; 0 when there is none."""
        return time.monotonic() - self._started if self.busy else 0.0

    def start(self, step: int, stall_seconds: float, save: Callable[[], Manifest | None]) -> None:
        """Begin `save` in a thread. The one before must be over and its outcome taken."""
        if self._thread is not None:
            raise RuntimeError("a save is in flight or its outcome was not taken")
        self._started = time.monotonic()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(step, stall_seconds, save), name=f"snapshot-{step}", daemon=True
        )
        self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Wait for the save in flight; False if it is still not over after `timeout` seconds."""
        if self._thread is not None:
            with storage_awaited():
                self._thread.join(timeout)
        return not self.busy

    def take(self) -> Outcome | None:
        """The outcome of a save that is over, once; None while there is none."""
        if self._thread is None or self.busy:
            return None
        outcome, self._outcome, self._thread = self._outcome, None, None
        return outcome

    def _run(self, step: int, stall_seconds: float, save: Callable[[], Manifest | None]) -> None:
        manifest, problem = None, None
        try:
            manifest = save()
        except Exception as error:
            problem = error
        self._outcome = Outcome(step, time.monotonic() - self._started, stall_seconds, manifest, problem)
