"""Resuming: rank 0 acquires the fence and decides, and every rank acts on that decision with the same bytes.

A snapshot that only one node sees, or sees differently, would otherwise send ranks on from different steps, and the
next collective would hang. So the decision, the errors and if need be the files themselves come from rank 0.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ddp_trainer.contract.exit_codes import FencedError, UserError
from ddp_trainer.contract.outcomes import is_of_machine
from ddp_trainer.rank.storage_waits import storage_awaited
from ddp_trainer.snapshots.codec import rng
from ddp_trainer.snapshots.codec.loading import load_into
from ddp_trainer.snapshots.codec.state import RNG, SHARDS, File, Stateful, file_in_memory, parse_files, read_files
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.rounds import Reading, meet
from ddp_trainer.snapshots.trust import earlier, restore, rollback
from ddp_trainer.snapshots.trust.errors import CorruptSnapshotError, IncompatibleSnapshotError, SnapshotError
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.manifest import Manifest, SnapshotInfo
from ddp_trainer.snapshots.trust.names import Series, not_writable, step_directory
from ddp_trainer.snapshots.trust.store import SnapshotStore
from ddp_trainer.snapshots.values import Identity, SnapshotEvent

log = logging.getLogger(__name__)

Files = dict[str, File]


@storage_awaited()
def acquire(
    directory: Path,
    identity: Identity,
    *,
    keep: int,
    keep_every: int | None = None,
    series: Series = "step",
    check_view: Callable[[], None] | None = None,
) -> SnapshotStore:
    """Rank 0's store, owned by this attempt, without what a person or an earlier one has asked to go back behind.

    Raises FencedError, UserError for a volume that cannot be written at all, SnapshotError for one that may be later.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fence = Fence.acquire(
            directory,
            created=identity.created,
            attempt=identity.attempt,
            uid=identity.uid,
            world_size=identity.world_size,
            nodes=identity.nodes,
            check_view=check_view,
        )
        # a client of NFS believes for up to a minute that there is no request to restore (see fence.Fence.check)
        with contextlib.suppress(PermissionError):
            os.utime(directory)
        # first: what it sets aside, a rollback would remove
        restore.carry_out(directory, fence, begins_anew=identity.begins_anew)
        rollback.carry_out(directory, fence, keep=keep)
        if identity.begins_anew:
            earlier.set_aside(directory, fence)
    except OSError as error:
        what = f"{directory} got no fencing token for attempt {identity.attempt}: {error}"
        if (refusal := not_writable(error, what)) is not None:
            raise refusal from error
        raise SnapshotError(f"{what}. Check that the volume is mounted and not full") from error
    return SnapshotStore(directory, keep=keep, keep_every=keep_every, fence=fence, series=series)


def agreed_obstacle(names: Iterable[str], obstacle: str | None, ranks: Ranks) -> str | None:
    """On all ranks alike, the first that a rank has to noting the end of each step, which they do together.

    Raises UserError where a rank has not the states, by name, of the others.
    """
    of_ranks = ranks.values([sorted(names), obstacle])
    first, _ = of_ranks[0]
    for rank, (own, _) in enumerate(of_ranks):
        for name in sorted(set(own) ^ set(first)):
            has, lacks = (rank, 0) if name in own else (0, rank)
            raise UserError(
                f"rank {has} has a state {name!r}, which rank {lacks} has not: pass it to attach() on every rank. The "
                "ranks note the end of a step together, and each loads all states; rank 0's are saved"
            )
    return next((text for _, text in of_ranks if text is not None), None)


def find_newest(
    directory: Path,
    identity: Identity,
    ranks: Ranks,
    *,
    keep: int,
    keep_every: int | None = None,
    check_view: Callable[[], None] | None = None,
    beat: Callable[[], None] = lambda: None,
) -> tuple[SnapshotStore | None, tuple[Manifest, Files] | None]:
    """Rank 0's store, None on the others, and the newest valid snapshot, the same on all ranks: None if there is none,
    its files verified and in memory on rank 0. All ranks `beat` as rank 0 reads on.

    Raises rank 0's error everywhere: as `acquire` and SnapshotStore.load_newest do.
    """
    store: SnapshotStore | None = None
    reading: Reading[tuple[Manifest, Files] | None] | None = None
    manifest: Manifest | None = None
    files: Files = {}
    error: Exception | None = None
    if ranks.rank == 0:
        try:
            store = acquire(directory, identity, keep=keep, keep_every=keep_every, check_view=check_view)
            reading = Reading(partial(_load_newest, store))
        except Exception as problem:
            error = problem
    meet(ranks, reading, beat)
    try:
        if reading is not None and (newest := reading.result()) is not None:
            manifest, files = newest
    except Exception as problem:
        error = problem
    manifest = decided_by_first(ranks, manifest, error)
    return store, None if manifest is None else (manifest, files)


def _load_newest(store: SnapshotStore, on_read: Callable[[], None]) -> tuple[Manifest, Files] | None:
    return store.load_newest(lambda directory, manifest: read_files(directory, manifest, on_read=on_read))


def check_owner(store: SnapshotStore | None, ranks: Ranks) -> None:
    """Raise FencedError on all ranks if a newer attempt has acquired the fence since rank 0 did.

    Reading a large snapshot takes long enough for that, and what comes next changes files of the job.
    """
    error = None
    if store is not None and store.fence is not None:
        try:
            with storage_awaited():
                store.fence.check()
        except FencedError as fenced:
            error = fenced
    decided_by_first(ranks, None, error)


def passed_over(what: str, info: SnapshotInfo) -> SnapshotEvent:
    """Of a snapshot or a checkpoint (`what`) that could not be read just then."""
    text = (
        f"{what} of step {info.step} is not used, since it cannot be read now ({info.problem}). It stays, and a later "
        "attempt may use it; check the volume's server and its network"
    )
    return SnapshotEvent("unreadable", info.step, text)


def share(directory: Path, manifest: Manifest, files: Files, ranks: Ranks) -> None:
    """Fill `files` on the other ranks: each reads for itself, and what one cannot read comes from rank 0."""
    problem = None
    if ranks.rank != 0:
        try:
            with storage_awaited():
                files.update(read_files(directory / step_directory(manifest.step), manifest, check_shards=False))
        except (OSError, CorruptSnapshotError) as error:
            problem = str(error)
    problems = {rank: text for rank, text in enumerate(ranks.problems(problem)) if text is not None}
    if not problems:
        return
    log.warning("rank 0 sends snapshot %d to all ranks, since these cannot read it: %s", manifest.step, problems)
    for name, entry in sorted(manifest.files.items()):
        if not name.startswith(f"{SHARDS}/"):
            file = files.setdefault(name, file_in_memory(name, entry.bytes))
            for piece in file.pieces():
                ranks.bytes_from_first(piece)


def check_sharding(directory: Path, manifest: Manifest, *, strategy: str, shards: bool) -> None:
    """Raise IncompatibleSnapshotError for a snapshot in shards where this run has none (`shards`), and the reverse."""
    is_sharded = any(name.startswith(f"{SHARDS}/") for name in manifest.files)
    if is_sharded != shards:
        raise IncompatibleSnapshotError(
            f"snapshot of step {manifest.step} in {directory} is of strategy {manifest.strategy}, this is "
            f"{strategy}: resume with a strategy that {'shards' if is_sharded else 'does not shard'} the "
            "model, or give the job another name to start over"
        )
    if is_sharded and (manifest.strategy == "pipeline") != (strategy == "pipeline"):
        raise IncompatibleSnapshotError(
            f"snapshot of step {manifest.step} in {directory} is of strategy {manifest.strategy}, this is "
            f"{strategy}, and stages of a pipeline are no shards: resume with --strategy {manifest.strategy}, or give "
            "the job another name to start over"
        )


def load(
    directory: Path,
    manifest: Manifest,
    files: Files,
    stateful: Mapping[str, Stateful],
    ranks: Ranks,
) -> str | None:
    """Put verified files into the program's objects and generators; returns what a person should know, if anything.

    Raises IncompatibleSnapshotError on all ranks if they do not fit on any. An error of the machine, such as one of its
    GPU, is raised on its own rank as it is: the snapshot may fit, so the job is not to end of it. The others lose a
    peer.
    """
    problem, notice = None, None
    try:
        states = parse_files(files)
        generators = states.pop(RNG)["ranks"]
        _load_states(states, stateful)
        notice = _load_generators(manifest, generators, ranks)
    except Exception as error:
        if is_of_machine(error):
            raise
        problem = str(error) or type(error).__name__
    for rank, text in enumerate(ranks.problems(problem)):
        if text is not None:
            raise IncompatibleSnapshotError(
                f"snapshot of step {manifest.step} in {directory} does not fit this program (rank {rank}): {text}. "
                "Run the program that wrote it, or give the job another name to start over"
            )
    return notice


def describe(manifest: Manifest) -> str:
    """What was resumed from, for people."""
    return (
        f"resumed from step {manifest.step} (epoch {manifest.epoch}, {manifest.samples} samples), "
        f"saved by attempt {manifest.attempt}"
    )


def _load_states(states: dict[str, Any], stateful: Mapping[str, Stateful]) -> None:
    """A state with a true `may_be_absent` stays as it is where the snapshot, of an earlier version, lacks it."""
    needed = {name for name, value in stateful.items() if not getattr(value, "may_be_absent", False)}
    if not needed <= states.keys() <= stateful.keys():
        raise IncompatibleSnapshotError(f"it holds {sorted(states)}, the program has {sorted(stateful)}")
    keep_types = all(
        _has_types_of(states[name], value.state_dict())
        for name, value in stateful.items()
        if isinstance(value, nn.Module) and name in states
    )
    for name, value in stateful.items():
        if name not in states:
            continue
        try:
            load_into(value, states.pop(name), keep_types=keep_types)
        except Exception as error:
            if is_of_machine(error):
                raise
            raise IncompatibleSnapshotError(f"{name}: {error}") from error


def _has_types_of(saved: Any, own: Mapping[str, Any]) -> bool:
    """Whether the weights of a module have the types that they were saved with: a program may have others now."""
    both = ((tensor, own.get(name)) for name, tensor in saved.items())
    return all(one.dtype == other.dtype for one, other in both if isinstance(one, Tensor) and isinstance(other, Tensor))


def _load_generators(manifest: Manifest, generators: Tensor, ranks: Ranks) -> str | None:
    if len(generators) == ranks.world_size:
        rng.restore(generators[ranks.rank])
        return None
    rng.reseed(generators[0], step=manifest.step, rank=ranks.rank, world_size=ranks.world_size)
    return (
        f"snapshot of step {manifest.step} is of {len(generators)} ranks, this is {ranks.world_size}: random numbers "
        "start anew, derived from the snapshot's. The run is repeatable but not the one it would have been"
    )


_ERRORS: Mapping[str, type[Exception]] = {
    "fenced": FencedError,
    "incompatible": IncompatibleSnapshotError,
    "user": UserError,
    "snapshot": SnapshotError,
}


def decided_by_first(ranks: Ranks, manifest: Manifest | None, error: Exception | None) -> Manifest | None:
    """Rank 0's `manifest` on every rank, or rank 0's `error` raised on every rank; the others' own do not matter."""
    decision = ranks.from_first(_decision(manifest, error) if ranks.rank == 0 else None)
    if ranks.rank == 0 and error is not None:
        raise error
    return decided(decision)


def _decision(manifest: Manifest | None, error: Exception | None) -> dict[str, Any]:
    if error is not None:
        kind = next((name for name, type_ in _ERRORS.items() if isinstance(error, type_)), "snapshot")
        return {"error": kind, "message": str(error) or type(error).__name__}
    return {"manifest": manifest.to_json().decode() if manifest else None}


def decided(decision: Mapping[str, Any]) -> Manifest | None:
    if "error" in decision:
        raise _ERRORS[decision["error"]](decision["message"])
    text = decision["manifest"]
    return Manifest.from_json(text.encode()) if text is not None else None
