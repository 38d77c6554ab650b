"""States that no rank holds alone: each rank writes its own part, and any number of ranks can read them back.

torch.distributed.checkpoint (DCP) decides which rank writes which part of which tensor and, at another world size, who
reads what. Its own file formats are pickles, so the storage below it is ours: a safetensors and a JSON file a rank, and
one JSON index. All ranks write into the one temporary directory that rank 0 then sums, syncs and renames as any other
snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from torch.optim import Optimizer

from ddp_trainer.snapshots.buffers import Buffers, chunks
from ddp_trainer.snapshots.disk import Disk
from ddp_trainer.snapshots.errors import CorruptSnapshotError, IncompatibleSnapshotError, SnapshotError
from ddp_trainer.snapshots.manifest import Manifest
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.state import SHARDS, Stateful
from ddp_trainer.snapshots.structure import put_together, take_apart
from ddp_trainer.snapshots.tensorfile import DTYPES, dtype_name, parse
from ddp_trainer.snapshots.verify import read_verified

INDEX = f"{SHARDS}/index.json"
_VERSION = 1


class ShardedOptimizer:
    """An optimizer over sharded parameters, its state by their names, so that any world size can load it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> Mapping[str, Any]:
        """With tensors also before the first step: they are what a resume loads into."""
        return get_optimizer_state_dict(self._model, self._optimizer)

    def load_state_dict(self, state_dict: Any, /) -> None:
        """Take over what `state_dict` returned."""
        set_optimizer_state_dict(self._model, self._optimizer, optim_state_dict=state_dict)


@dataclass(frozen=True, slots=True)
class StagedShard:
    """This rank's part, in reused buffers. `index` is set on rank 0."""

    rank: int
    header: bytes
    data: Tensor
    structure: bytes
    index: bytes | None

    @property
    def total_bytes(self) -> int:
        """Bytes that this rank is going to write."""
        return len(self.header) + self.data.numel() + len(self.structure) + len(self.index or b"")

    def write(self, directory: Path, disk: Disk) -> None:
        """Write and sync this rank's files; raises OSError. Rank 0 has made the folder."""
        files = {_tensors(self.rank): chunks(self.header, self.data), _structure(self.rank): [self.structure]}
        if self.index is not None:
            files[INDEX] = [self.index]
        for name, content in files.items():
            disk.create(directory / name, content)
            # By the rank that wrote them: on a network file system only its own client can flush them.
            disk.fsync(directory / name)


class Shards:
    """The sharded states of a program. `stage` and `load` are collectives; the rest is for the writing threads."""

    def __init__(self, stateful: Mapping[str, Stateful], ranks: Ranks, *, timeout: float) -> None:
        self.names = frozenset(stateful)
        self._stateful = stateful
        self._ranks = ranks
        self._buffers = Buffers()
        # The writing threads of all ranks meet on a group of their own, at times when training uses the other.
        self._writers = Ranks(ranks.rank, ranks.world_size, own_group=timedelta(seconds=timeout))

    def stage(self) -> StagedShard:
        """Copy this rank's part of every state. Raises SnapshotError on all ranks alike."""
        structure: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        error: Exception | None = None
        try:
            for name, value in self._stateful.items():
                structure[name] = take_apart(value.state_dict(), name, tensors, sharded=True)
        except Exception as problem:
            error = problem
        self._agree(error, self._ranks)
        writer = _StagingWriter(self._buffers, self._ranks.rank)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        group = self._ranks.group
        try:
            dcp_save(tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
        except CheckpointException as problem:
            rank, (cause, _) = min(problem.failures.items())
            raise SnapshotError(f"rank {rank}: {cause}") from problem
        header, data = writer.staged
        text = json.dumps({"version": _VERSION, "states": structure}).encode()
        return StagedShard(self._ranks.rank, header, data, text, writer.index)

    def lead(self, shard: StagedShard, directory: Path, disk: Disk) -> None:
        """Rank 0: have all ranks write into `directory`. Raises SnapshotError naming the rank that could not."""
        disk.make_directory(directory / SHARDS)
        self._writers.from_first({"directory": str(directory)})
        self._write(shard, directory, disk)

    def dismiss(self) -> None:
        """Rank 0: tell the others that this save is over, however it went."""
        self._writers.from_first({"directory": None})

    def follow(self, shard: StagedShard, disk: Disk) -> None:
        """The other ranks: write when and where rank 0 says, until it says that the save is over."""
        while (directory := self._writers.from_first(None)["directory"]) is not None:
            try:
                self._write(shard, Path(directory), disk)
            except SnapshotError:
                # rank 0 has heard of it too, and decides whether to try again
                continue

    def load(self, directory: Path, manifest: Manifest) -> None:
        """Load the states from `directory`, whatever world size wrote it.

        Raises IncompatibleSnapshotError for states that do not fit, SnapshotError for files that cannot be read.
        """
        current: dict[str, Tensor] = {}
        structure: dict[str, Any] = {}
        error: Exception | None = None
        try:
            for name, value in self._stateful.items():
                take_apart(value.state_dict(), name, current, sharded=True)
            structure = _read_structure(directory, manifest, self._ranks)
            lacking = sorted((structure.keys() ^ self._stateful.keys()) | (_references(structure) - current.keys()))
            if lacking:
                raise IncompatibleSnapshotError(f"{', '.join(lacking[:3])}: not both in it and in the program")
        except Exception as problem:
            error = problem
        # Agreed before DCP's own collectives, which a rank must not enter alone.
        self._agree(error, self._ranks)
        wanted = {name: current[name] for name in sorted(_references(structure))}
        group = self._ranks.group
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = _VerifyingReader(directory, manifest)
        try:
            dcp_load(wanted, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
            for name, value in self._stateful.items():
                value.load_state_dict(put_together(structure[name], wanted))
        except CheckpointException as problem:
            rank, (cause, _) = min(problem.failures.items())
            kind = SnapshotError if isinstance(cause, OSError | CorruptSnapshotError) else IncompatibleSnapshotError
            raise kind(f"snapshot of step {manifest.step}, rank {rank}: {cause}") from problem

    def _write(self, shard: StagedShard, directory: Path, disk: Disk) -> None:
        error: Exception | None = None
        try:
            shard.write(directory, disk)
        except Exception as problem:
            error = problem
        self._agree(error, self._writers)

    def _agree(self, error: Exception | None, ranks: Ranks) -> None:
        """Raise on all ranks what any one could not do."""
        kind = "incompatible" if isinstance(error, IncompatibleSnapshotError) else "other"
        text = None if error is None else f"{kind}:{error or type(error).__name__}"
        for rank, problem in enumerate(ranks.problems(text)):
            if problem is not None:
                kind, _, message = problem.partition(":")
                raise (IncompatibleSnapshotError if kind == "incompatible" else SnapshotError)(
                    f"rank {rank}: {message}"
                )


class _StagingWriter(StorageWriter):
    """DCP's storage for saving that only copies into buffers, and leaves them in `staged` and `index`."""

    def __init__(self, buffers: Buffers, rank: int) -> None:
        self._buffers = buffers
        self._rank = rank
        self.staged: tuple[bytes, Tensor] = (b"", torch.empty(0, dtype=torch.uint8))
        self.index: bytes | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to open yet."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As DCP made it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As DCP made it."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy the parts that the plan gives this rank."""
        parts: dict[str, Tensor] = {}
        results = []
        for item in plan.items:
            key = f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"
            part = planner.resolve_data(item)
            assert isinstance(part, Tensor)
            parts[key] = part.detach()
            results.append(WriteResult(item.index, part.nbytes, {"file": _tensors(self._rank), "key": key}))
        self.staged = self._buffers.copy(SHARDS, parts)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0: which part of which tensor lies where."""
        places = {result.index: result.storage_data for rank in results for result in rank}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = {
                "dtype": dtype_name(entry.properties.dtype),
                "shape": list(entry.size),
                "parts": [
                    {
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                        **places[MetadataIndex(name, chunk.offsets)],
                    }
                    for chunk in entry.chunks
                ],
            }
        self.index = json.dumps({"version": _VERSION, "tensors": tensors}).encode()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """DCP is not given paths."""
        return True


class _VerifyingReader(StorageReader):
    """DCP's storage for loading: reads the files that the plan needs, whole and verified."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._places: dict[MetadataIndex, tuple[str, str]] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata from our index."""
        index = json.loads(_read(self._directory, self._manifest, INDEX))
        if index["version"] != _VERSION:
            raise IncompatibleSnapshotError(f"{INDEX} is of version {index['version']}, this image reads {_VERSION}")
        tensors: dict[str, Any] = {}
        for name, entry in index["tensors"].items():
            parts = [
                ChunkStorageMetadata(torch.Size(part["offsets"]), torch.Size(part["sizes"])) for part in entry["parts"]
            ]
            properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), parts)
            for part in entry["parts"]:
                self._places[MetadataIndex(name, torch.Size(part["offsets"]))] = (part["file"], part["key"])
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All is known from `read_metadata`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As DCP made it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As DCP made it."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the regions that the plan asks for, file by file so that one at a time is in memory."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index][0], []).append(item)
        for name, items in by_file.items():
            parts = parse(_read(self._directory, self._manifest, name), copy=False)
            for item in items:
                source = parts[self._places[item.storage_index][1]]
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    source = source.narrow(dim, offset, length)
                target = planner.resolve_tensor(item).detach()
                if target.dtype != source.dtype:
                    what = f"{item.dest_index.fqn} is {source.dtype} in it and {target.dtype} in the program"
                    raise IncompatibleSnapshotError(what)
                target.copy_(source)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """DCP is not given paths."""
        return True


def _read_structure(directory: Path, manifest: Manifest, ranks: Ranks) -> dict[str, Any]:
    """This rank's states without their tensors; at another world size they must have been the same on every rank."""
    if manifest.world_size == ranks.world_size:
        names = {_structure(ranks.rank)}
    else:
        names = {_structure(rank) for rank in range(manifest.world_size)}
    texts = {bytes(_read(directory, manifest, name)) for name in sorted(names)}
    if len(texts) > 1:
        raise IncompatibleSnapshotError(
            f"its {manifest.world_size} ranks hold different parts of the model, as pipeline stages do; "
            f"resume it with {manifest.world_size} ranks, not {ranks.world_size}"
        )
    value = json.loads(texts.pop())
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


def _read(directory: Path, manifest: Manifest, name: str) -> bytearray:
    entry = manifest.files.get(name)
    if entry is None:
        raise CorruptSnapshotError(f"{name} is not in the manifest")
    return read_verified(directory, name, entry)


def _tensors(rank: int) -> str:
    return f"{SHARDS}/rank-{rank:05d}.safetensors"


def _structure(rank: int) -> str:
    return f"{SHARDS}/rank-{rank:05d}.json"
