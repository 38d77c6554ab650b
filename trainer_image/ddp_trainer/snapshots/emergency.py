"""The last finished step, saved by rank 0 alone after an exception that ends training: the others may be gone."""

from __future__ import annotations

import time
from datetime import timedelta

from ddp_trainer.snapshots.boundary import Boundaries, Boundary
from ddp_trainer.snapshots.errors import SnapshotError
from ddp_trainer.snapshots.manifest import Manifest
from ddp_trainer.snapshots.saving import EMERGENCY_SECONDS, Saver

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
    verdict = saver.ready(manifest, wait=True)
    if verdict != "begin":
        return verdict == "saved"
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
