"""Saving on rank 0: stage the states, write them in the background, and report how the save before ended.

A save that fails or takes long is an event, never an exception: training is worth more than any one snapshot. The one
exception is being fenced, after which training here is worth nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, get_args

from torch import Tensor

from ddp_trainer.contract.exit_codes import FencedError
from ddp_trainer.snapshots.background import PATIENCE_SECONDS, BackgroundWriter, Outcome
from ddp_trainer.snapshots.boundary import Boundaries, Boundary, as_of
from ddp_trainer.snapshots.codec.state import RNG, Staged, Staging, Stateful
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.manifest import Manifest
from ddp_trainer.snapshots.trust.store import SnapshotStore
from ddp_trainer.snapshots.values import FAILING_AFTER, SnapshotEvent

if TYPE_CHECKING:
    from ddp_trainer.snapshots.sharded import Shards, StagedShard

log = logging.getLogger(__name__)

Ready = Literal["begin", "saved", "skipped"]
READY: Final[tuple[Ready, ...]] = get_args(Ready)

EMERGENCY_SECONDS = 20.0
"""How long an emergency snapshot may take: torchrun kills what is left of a failed job 30 seconds after the failure."""


class Saver:
    """Saves `stateful` into `store`, one save in flight. `on_event` gets events, always on the calling thread."""

    def __init__(
        self,
        store: SnapshotStore,
        stateful: Mapping[str, Stateful],
        on_event: Callable[[SnapshotEvent], None],
        *,
        last_saved: Manifest | None,
        timeout: float,
        shards: Shards | None = None,
    ) -> None:
        self.last_saved = last_saved
        self._store = store
        self._stateful = stateful
        self._emit = on_event
        self._timeout = timeout
        self._shards = shards
        self._staging = Staging()
        self._writer = BackgroundWriter()
        self._step_in_flight: int | None = None
        self._failures = 0

    def ready(self, manifest: Manifest, *, wait: bool) -> Ready:
        """Whether to begin this save, or whether it is done or under way already, or must be skipped.

        Raises FencedError.
        """
        self.collect()
        if manifest.step == self._saved_step() or (manifest.step == self._step_in_flight and not wait):
            return "saved"
        patience = EMERGENCY_SECONDS if manifest.kind == "emergency" else self._timeout
        if manifest.kind == "periodic" and not wait:
            patience = PATIENCE_SECONDS - self._writer.busy_seconds
        self._writer.wait(max(0.0, patience))
        self.collect()
        if self._writer.busy:
            self._skipped(manifest.step)
            return "skipped"
        return "saved" if manifest.step == self._saved_step() else "begin"

    def begin(
        self,
        manifest: Manifest,
        generators: Tensor,
        *,
        started: float,
        shard: StagedShard | None = None,
        boundary: Boundary | None = None,
    ) -> bool:
        """Copy the present states and have them written; False if they cannot be copied.

        `generators` holds those of all ranks, uint8 [world size, bytes]; `started` is the monotonic time at which
        training stopped; `shard` is this rank's part of the sharded states; `boundary` is what the states are to be of
        if training has gone on since.
        """
        try:
            states = {name: value.state_dict() for name, value in self._stateful.items()}
            if boundary is not None:
                states = as_of(boundary, states)
            staged = self._staging.stage({**states, RNG: {"ranks": generators}})
        except Exception as error:
            if self._shards is not None and shard is not None:
                self._shards.dismiss()
            self.failed(manifest.step, error, started)
            return False
        self._step_in_flight = manifest.step
        stall = time.monotonic() - started
        self._writer.start(manifest.step, stall, lambda: self._write(manifest, staged, shard))
        return True

    def finish(self, step: int, *, timeout: float | None = None) -> bool:
        """Wait for the save in flight; whether `step` is saved. Raises FencedError."""
        self._writer.wait(self._timeout if timeout is None else timeout)
        self.collect()
        return self._saved_step() == step

    def collect(self) -> None:
        """Report how a save that is over has ended. Raises FencedError."""
        outcome = self._writer.take()
        if outcome is None:
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

    def close(self) -> None:
        """Wait for the save in flight and report how it ended; raises nothing."""
        if not self._writer.wait(self._timeout):
            hung = TimeoutError(
                f"snapshot of step {self._step_in_flight} not written within {self._timeout:.0f} s: the volume hangs"
            )
            self._failed(Outcome(self._step_in_flight or 0, self._writer.busy_seconds, 0.0, error=hung))
            return
        try:
            self.collect()
        except FencedError as error:
            log.warning("%s", error)

    def failed(self, step: int, error: Exception, started: float) -> None:
        """Report that the states of `step` could not be staged."""
        self._failed(Outcome(step, 0.0, time.monotonic() - started, error=error))

    def _write(self, manifest: Manifest, staged: Staged, shard: StagedShard | None) -> Manifest:
        """In the background."""
        store, shards = self._store, self._shards

        def write(directory: Path) -> None:
            staged.write(directory, store.disk)
            if shards is not None and shard is not None:
                shards.lead(shard, directory, store.disk)

        expected = staged.total_bytes + (shard.total_bytes * manifest.world_size if shard is not None else 0)
        try:
            return store.save(write, manifest, expected_bytes=expected)
        finally:
            if shards is not None and shard is not None:
                shards.dismiss()

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

    def give_up(self, step: int, problem: str) -> None:
        """Report that there will be no emergency snapshot."""
        saved = self._saved_step()
        goes_on = "starts over" if saved is None else f"goes on from step {saved}"
        message = f"no emergency snapshot: {problem}. The next attempt {goes_on}"
        self._emit(SnapshotEvent("skipped", step, message))

    def _skipped(self, step: int) -> None:
        busy = self._writer.busy_seconds
        if busy > self._timeout:
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

    def _saved_step(self) -> int | None:
        return self.last_saved.step if self.last_saved is not None else None


GENERATORS_TIMEOUT = timedelta(seconds=5)
"""How long rank 0 waits, after a failure, for what the other ranks sent at the end of the last step."""


def save_last_step(boundaries: Boundaries, saver: Saver, manifest: Manifest | None) -> bool:
    """Save the newest boundary, if the states are still those of it; `manifest` is what it will have, None if there is
    no boundary yet.

    True if the last finished step is saved; where it cannot be, an event says why. Raises nothing, and takes up to a
    minute if the volume hangs.
    """
    boundary = boundaries.newest
    step = manifest.step if manifest is not None else 0
    try:
        if boundaries.obstacle is not None:
            saver.finish(step, timeout=EMERGENCY_SECONDS)
            raise SnapshotError(boundaries.obstacle)
        return boundary is not None and manifest is not None and _save(boundary, boundaries, saver, manifest)
    except Exception as problem:
        saver.give_up(step, str(problem) or type(problem).__name__)
        return False


def _save(boundary: Boundary, boundaries: Boundaries, saver: Saver, manifest: Manifest) -> bool:
    started = time.monotonic()
    ready = saver.ready(manifest, wait=True)
    if ready != "begin":
        return ready == "saved"
    problem = boundaries.problem()
    if problem is not None:
        raise SnapshotError(problem)
    try:
        generators = boundary.generators.wait(GENERATORS_TIMEOUT)
    except RuntimeError as lost:
        raise SnapshotError(f"the random number state of another rank did not arrive ({lost})") from lost
    assert generators is not None
    if not saver.begin(manifest, generators, started=started, boundary=boundary):
        return False
    return saver.finish(manifest.step, timeout=EMERGENCY_SECONDS)
