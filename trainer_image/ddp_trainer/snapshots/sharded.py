"""States that no rank holds alone: each rank writes its own part, and any number of ranks can read them back.

torch.distributed.checkpoint (DCP) decides which rank writes which part of which tensor and, at another world size, who
reads what. Its own file formats are pickles, so the storage below it is ours: a safetensors and a JSON file a rank, and
one JSON index. All ranks write into the one temporary directory that rank 0 then sums, syncs and renames as any other
snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from ddp_trainer.contract.json_files import FULL
from ddp_trainer.contract.outcomes import is_of_machine
from ddp_trainer.snapshots.codec.loading import load_into, loading
from ddp_trainer.snapshots.codec.state import SHARDS, Stateful
from ddp_trainer.snapshots.codec.structure import decode, encode
from ddp_trainer.snapshots.codec.tensorfile import Buffers, chunks
from ddp_trainer.snapshots.ranks import Ranks, ShardRanks
from ddp_trainer.snapshots.rounds import Reading, meet
from ddp_trainer.snapshots.shard_storage import (
    INDEX,
    StagingWriter,
    VerifyingReader,
    entry_of,
    read_file,
    read_whole,
    tensor_file,
)
from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.errors import (
    CorruptSnapshotError,
    IncompatibleSnapshotError,
    SnapshotError,
    VolumeFullError,
)
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest
from ddp_trainer.snapshots.trust.verify import read_back

_VERSION = 1
_AGREED = (SnapshotError, VolumeFullError, IncompatibleSnapshotError)


class ShardedOptimizer:
    """An optimizer over sharded parameters, its state by their names, so that any world size can load it.

    A parameter that has had no gradient yet (an unused head, an expert, a branch that starts later) has no state, here
    as in the optimizer; it gets one at its first gradient.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> Mapping[str, Any]:
        """The state of each parameter that has one; leaves the optimizer as it is."""
        is_new = not self._optimizer.state
        state = get_optimizer_state_dict(self._model, self._optimizer)
        if is_new:
            # torch has made a state as of a first step for every parameter, which would count as one
            self._optimizer.state.clear()
            state["state"] = {}
        return state

    def load_target(self) -> Mapping[str, Any]:
        """A state of every parameter, sharded as this world size shards it, for a snapshot to be read into.

        The optimizer must be new: `load_state_dict` comes next.
        """
        return get_optimizer_state_dict(self._model, self._optimizer)

    def load_state_dict(self, state_dict: Any, /) -> None:
        """Take over what `state_dict` returned; a parameter without a state in it has none afterwards."""
        # strict refuses a parameter without a state, which is how a snapshot before its first gradient has it
        options = StateDictOptions(strict=False)
        with loading(self._optimizer):
            set_optimizer_state_dict(self._model, self._optimizer, optim_state_dict=state_dict, options=options)


@dataclass(frozen=True, slots=True)
class StagedShard:
    """This rank's part, in reused buffers. `index` is set on rank 0."""

    rank: int
    header: bytes
    data: Tensor
    structure: bytes
    index: bytes | None
    total_bytes: int
    """Bytes that all ranks together are going to write."""

    def write(self, directory: Path, disk: Disk) -> dict[str, FileEntry]:
        """Write this rank's files, and return what they are by name; raises OSError. Rank 0 has made the folder."""
        files = {tensor_file(self.rank): chunks(self.header, self.data), _structure(self.rank): [self.structure]}
        if self.index is not None:
            files[INDEX] = [self.index]
        return {name: disk.create(directory / name, content) for name, content in files.items()}


class _Planner(DefaultSavePlanner):
    """Shards that several ranks hold are spread over these. Of tensors that are whole on each, such as running
    statistics, the first rank's are saved: torch would take the mean of one rank and the variance of another.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        seen: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            known = frozenset(seen)
            plans.append(replace(plan, items=[item for item in plan.items if item.index not in known]))
            seen |= {item.index for item in plan.items if item.type is WriteItemType.TENSOR}
        return super().create_global_plan(plans)


class Shards:
    """The sharded states of a program. `stage` and `load` are collectives; the rest is for the writing threads."""

    def __init__(
        self, stateful: Mapping[str, Stateful], ranks: Ranks, *, timeout: float, shard_ranks: ShardRanks | None = None
    ) -> None:
        """`ranks` are all, `shard_ranks` those that hold one copy of the model, where all hold several."""
        self._stateful = stateful
        self._shard_ranks = shard_ranks
        self._ranks = ranks if shard_ranks is None else Ranks.of_shards(shard_ranks)
        self._buffers = Buffers()
        self._timeout = timeout
        self._writers = self._new_writers()
        self._are_lost = False
        """Whether the writing threads' group has failed here: gloo's never work again."""

    def _new_writers(self) -> Ranks:
        """The writing threads of all ranks, on a group of their own: they meet when training uses the other."""
        if self._shard_ranks is not None:
            return Ranks.of_shards(self._shard_ranks, timedelta(seconds=self._timeout))
        return Ranks(self._ranks.rank, self._ranks.world_size, own_group=timedelta(seconds=self._timeout))

    @property
    def size(self) -> int:
        """How many ranks hold one copy of the model: the first of all ranks save it."""
        return self._ranks.world_size

    @property
    def together(self) -> Callable[[], AbstractContextManager[None]]:
        """As that of `ShardRanks`."""
        return nullcontext if self._shard_ranks is None else self._shard_ranks.together

    def stage(self, unfinished: SnapshotError | None) -> StagedShard:
        """Copy this rank's part of every state. Rank 0 is through with the save before.

        Raises SnapshotError on all ranks alike, also where `unfinished` says that a rank still writes its part of that
        one.
        """
        self._agree(unfinished, self._ranks)
        if any(self._ranks.problems("lost" if self._are_lost else None)):
            # No thread of any rank uses the old group any more. It is not taken apart: that may wait for its peers.
            self._writers, self._are_lost = self._new_writers(), False
        structure: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        error: Exception | None = None
        try:
            for name, value in self._stateful.items():
                structure[name] = encode(value.state_dict(), name, tensors, sharded=True)
        except Exception as problem:
            error = problem
        self._agree(error, self._ranks)
        writer = StagingWriter(self._buffers, self._ranks.rank)
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        group = self._ranks.group
        try:
            dcp_save(tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
        except CheckpointException as problem:
            rank, (cause, _) = min(problem.failures.items())
            raise SnapshotError(f"rank {rank}: {cause}") from problem
        header, data = writer.staged
        text = json.dumps({"version": _VERSION, "states": structure}).encode()
        # Parts differ: rank 0 has the index, which grows with the ranks, and whole tensors, another one a larger stage.
        own = len(header) + data.numel() + len(text) + len(writer.index or b"")
        return StagedShard(self._ranks.rank, header, data, text, writer.index, sum(self._ranks.values(own)))

    def lead(self, shard: StagedShard, directory: Path, disk: Disk) -> dict[str, FileEntry]:
        """Rank 0: have all ranks write into `directory`, and return what all files are by name. What other ranks wrote
        is read back here, through another client of the volume. Raises SnapshotError naming the rank that could not
        write, VolumeFullError if for want of room, or whose file is another one here, and OSError.
        """
        disk.make_directory(directory / SHARDS)
        self._share_directory(str(directory))
        parts = self._write(shard, directory, disk)
        reading = Reading(lambda on_read: _check_others(directory, parts))
        with suppress(RuntimeError), self._together() as writers:  # what is written needs no other rank any more
            meet(writers, reading)
        reading.result()
        return {name: entry for part in parts for name, entry in part.items()}

    def dismiss(self) -> None:
        """Rank 0: let the others know that this save is over, however it went. Raises nothing of it: where they have
        waited too long to hear of it, the snapshot is saved, or this rank is fenced, all the same.
        """
        if not self._are_lost:
            with suppress(RuntimeError):
                self._share_directory(None)

    def follow(self, shard: StagedShard, disk: Disk) -> None:
        """The other ranks: write when and where rank 0 says, until it says that the save is over."""
        while (directory := self._share_directory(None)) is not None:
            try:
                self._write(shard, Path(directory), disk)
            except SnapshotError:
                # rank 0 has heard of it too, and decides whether to try again
                continue
            with self._together() as writers:  # all parts take rank 0 longer to read than a collective may
                meet(writers, None)

    def load(self, directory: Path, manifest: Manifest) -> None:
        """Load the states from `directory`, whatever world size wrote it.

        Raises IncompatibleSnapshotError for states that do not fit, SnapshotError for files that cannot be read. An
        error of the machine, such as one of its GPU, is raised on its own rank as it is; the others lose a peer.
        """
        current: dict[str, Tensor] = {}
        structure: dict[str, Any] = {}
        reader = VerifyingReader(directory, manifest)
        error: Exception | None = None
        try:
            for name, value in self._stateful.items():
                target = value.load_target() if isinstance(value, ShardedOptimizer) else value.state_dict()
                encode(target, name, current, sharded=True)
            reader.read_index()
            structure = _read_structure(directory, manifest, self._ranks)
            lacking = sorted((structure.keys() ^ self._stateful.keys()) | (_references(structure) - current.keys()))
            if lacking:
                raise IncompatibleSnapshotError(f"{', '.join(lacking[:3])}: not both in it and in the program")
        except Exception as problem:
            error = problem
        # Agreed before DCP's own collectives, which a rank must not enter alone.
        self._agree(error, self._ranks)
        wanted = {name: reader.target(name, current[name]) for name in sorted(_references(structure))}
        group = self._ranks.group
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            dcp_load(wanted, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
        except CheckpointException as problem:
            self._raise_cause(problem, manifest.step)
        error = None
        for name, value in self._stateful.items():
            try:
                load_into(value, decode(structure[name], wanted))
            except Exception as problem:
                if is_of_machine(problem):
                    raise
                error = IncompatibleSnapshotError(
                    f"snapshot of step {manifest.step} in {directory.parent} does not fit this program. Run the one "
                    f"that wrote it, or give the job another name to start over. {name}: {problem}"
                )
                break
        self._agree(error, self._ranks)

    def _raise_cause(self, problem: CheckpointException, step: int) -> NoReturn:
        """What has ended a load on all ranks, as far as it is for each to say."""
        rank, (cause, _) = min(problem.failures.items(), key=itemgetter(0))
        what = f"snapshot of step {step}, rank {rank}"
        if isinstance(cause, OSError | CorruptSnapshotError):
            raise SnapshotError(f"{what}: {cause}") from problem
        if not is_of_machine(cause):
            raise IncompatibleSnapshotError(f"{what}: {cause}") from problem
        own = problem.failures.get(self._ranks.rank)
        if own is not None:
            raise own[0] from problem
        # with the words of the error, the machine of this rank would be blamed for it
        raise RuntimeError(f"{what} could not load its part, and ends: remote process exited") from problem

    def _write(self, shard: StagedShard, directory: Path, disk: Disk) -> list[dict[str, FileEntry]]:
        """Write this rank's files; what each rank wrote, by rank."""
        files: dict[str, FileEntry] = {}
        error: Exception | None = None
        try:
            files = shard.write(directory, disk)
        except Exception as problem:
            error = problem
        with self._together() as writers:
            self._agree(error, writers)
            parts = writers.values({name: [entry.bytes, entry.sha256] for name, entry in files.items()})
        return [{name: FileEntry(*entry) for name, entry in part.items()} for part in parts]

    def _share_directory(self, directory: str | None) -> str | None:
        """Rank 0's `directory` on the writing threads of all ranks; None when the save is over."""
        with self._together() as writers:
            shared: str | None = writers.from_first({"directory": directory})["directory"]
        return shared

    @contextmanager
    def _together(self) -> Iterator[Ranks]:
        """The writing threads of all ranks. Raises RuntimeError where they have lost each other, as by a timeout."""
        try:
            yield self._writers
        except RuntimeError:
            self._are_lost = True
            raise

    def _agree(self, error: Exception | None, ranks: Ranks) -> None:
        """Raise on all ranks what any one could not do."""
        text = None if error is None else f"{_kind(error).__name__}:{error or type(error).__name__}"
        for rank, problem in enumerate(ranks.problems(text)):
            if problem is not None:
                name, _, message = problem.partition(":")
                raise next(kind for kind in _AGREED if kind.__name__ == name)(f"rank {rank}: {message}")


def _check_others(directory: Path, parts: Sequence[Mapping[str, FileEntry]]) -> None:
    """On rank 0: read what the other ranks wrote. Raises as `Shards.lead` does."""
    for rank, part in enumerate(parts):
        for name, entry in part.items() if rank else ():
            with (directory / name).open("rb") as file:
                found = read_back(file)
            if found != entry:
                raise SnapshotError(
                    f"rank {rank}: {name}, written with {entry.bytes} bytes and SHA-256 {entry.sha256[:12]}…, is "
                    f"read by rank 0 with {found.bytes} bytes and {found.sha256[:12]}…. Check the volume's server, "
                    "and its mount on both nodes"
                )


def _kind(error: Exception) -> type[SnapshotError]:
    """As what all ranks raise an error of one of them."""
    if isinstance(error, OSError) and error.errno in FULL:
        return VolumeFullError
    return IncompatibleSnapshotError if isinstance(error, IncompatibleSnapshotError) else SnapshotError


def whole_state(directory: Path, manifest: Manifest, name: str) -> dict[str, Any]:
    """State `name` assembled from its parts, a pipeline's from all stages. Raises KeyError if there is none."""
    tensors = read_whole(directory, manifest)
    state: dict[str, Any] = {}
    for rank in range(manifest.world_size):
        structure = json.loads(read_file(directory, manifest, _structure(rank)))["states"]
        state |= decode(structure[name], tensors)
    return state


def _read_structure(directory: Path, manifest: Manifest, ranks: Ranks) -> dict[str, Any]:
    """This rank's states without their tensors; at another world size they must have been the same on every rank."""
    name = _structure(ranks.rank)
    if manifest.world_size != ranks.world_size:
        name = _structure(0)
        # the checksums tell: if each of a thousand ranks read all of them, that would be a million files
        if len({entry_of(manifest, _structure(rank)) for rank in range(manifest.world_size)}) > 1:
            raise IncompatibleSnapshotError(
                f"its {manifest.world_size} ranks hold different parts of the model, as pipeline stages do; "
                f"resume it with {manifest.world_size} ranks, not {ranks.world_size}"
            )
    value = json.loads(read_file(directory, manifest, name))
    if value["version"] != _VERSION:
        raise IncompatibleSnapshotError(f"its shards are of version {value['version']}, this image reads {_VERSION}")
    states: dict[str, Any] = value["states"]
    return states


def _references(value: Any) -> set[str]:
    """Names of all tensors that a structure refers to."""
    if isinstance(value, dict):
        names = {name for tag in ("$tensor", "$array") if isinstance(name := value.get(tag), str)}
        return names.union(*map(_references, value.values()))
    return set().union(*map(_references, value)) if isinstance(value, list) else set()


def _structure(rank: int) -> str:
    return f"{SHARDS}/rank-{rank:05d}.json"
