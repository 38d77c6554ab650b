"""Where DCP's parts of tensors lie in a snapshot: a safetensors file a rank, and one JSON index of all parts.

Saving only copies into buffers, for a thread to write later. Loading reads the files that a rank needs, whole, and
verifies them before it believes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ddp_trainer.snapshots.codec.state import SHARDS
from ddp_trainer.snapshots.codec.tensorfile import DTYPES, Buffers, TensorFile, dtype_name
from ddp_trainer.snapshots.trust.errors import CorruptSnapshotError, IncompatibleSnapshotError
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest
from ddp_trainer.snapshots.trust.verify import read_verified, read_verified_into

INDEX = f"{SHARDS}/index.json"
_VERSION = 1


class StagingWriter(StorageWriter):
    """DCP's storage for saving that only copies into buffers, and leaves them in `staged` and `index`."""

    def __init__(self, buffers: Buffers, rank: int) -> None:
        self._buffers = buffers
        self._rank = rank
        self.staged: tuple[bytes, Tensor] = (b"", torch.empty(0, dtype=torch.uint8, device="cpu"))
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
            results.append(WriteResult(item.index, part.nbytes, {"file": tensor_file(self._rank), "key": key}))
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


class VerifyingReader(StorageReader):
    """DCP's storage for loading: reads the files that the plan needs, whole and verified."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._places: dict[MetadataIndex, tuple[str, str]] = {}
        self._metadata = Metadata({})

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    def read_index(self) -> None:
        """DCP's metadata from our index, before a load. In one, DCP takes any error of it for a checkpoint that has
        none for all ranks, asks again, and where that succeeds goes on without the others, which wait for this rank.

        Raises CorruptSnapshotError, IncompatibleSnapshotError, OSError.
        """
        tensors: dict[str, Any] = {}
        for name, entry in _read_index(self._directory, self._manifest).items():
            parts = [
                ChunkStorageMetadata(torch.Size(part["offsets"]), torch.Size(part["sizes"])) for part in entry["parts"]
            ]
            properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), parts)
            for part in entry["parts"]:
                self._places[MetadataIndex(name, torch.Size(part["offsets"]))] = (part["file"], part["key"])
        self._metadata = Metadata(tensors)

    def target(self, name: str, own: Tensor) -> Tensor:
        """Where to read a tensor to: `own`, or new memory for one that each rank has whole, and that had another size.

        The extra state of a module (as Transformer Engine's) is as long as what is in it, and that of a new module has
        nothing yet. Whether a parameter fits is for its module to say.
        """
        saved = self._metadata.state_dict_metadata.get(name)
        if isinstance(own, DTensor) or not isinstance(saved, TensorStorageMetadata) or saved.size == own.size():
            return own
        return torch.empty(saved.size, dtype=own.dtype, device=own.device)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What `read_index` has found."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All is known from `read_index`."""

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
            parts = read_tensors(self._directory, self._manifest, name)
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


def read_whole(directory: Path, manifest: Manifest) -> dict[str, Tensor]:
    """All tensors of all shards, each assembled from its parts; for people who want the model, not for resuming."""
    index = _read_index(directory, manifest)
    whole = {
        name: torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="cpu") for name, entry in index.items()
    }
    by_file: dict[str, list[tuple[Tensor, Any]]] = {}
    for name, entry in index.items():
        for part in entry["parts"]:
            by_file.setdefault(part["file"], []).append((whole[name], part))
    for file in sorted(by_file):
        parts = read_tensors(directory, manifest, file)
        for tensor, part in by_file[file]:
            region = tuple(slice(o, o + n) for o, n in zip(part["offsets"], part["sizes"], strict=True))
            tensor[region] = parts[part["key"]]
    return whole


def _read_index(directory: Path, manifest: Manifest) -> dict[str, Any]:
    index = json.loads(read_file(directory, manifest, INDEX))
    if index["version"] != _VERSION:
        raise IncompatibleSnapshotError(f"{INDEX} is of version {index['version']}, this image reads {_VERSION}")
    tensors: dict[str, Any] = index["tensors"]
    return tensors


def read_file(directory: Path, manifest: Manifest, name: str) -> bytearray:
    """One verified file. Raises CorruptSnapshotError, OSError."""
    return read_verified(directory, name, entry_of(manifest, name))


def read_tensors(directory: Path, manifest: Manifest, name: str) -> dict[str, Tensor]:
    """The tensors of one verified file. Raises CorruptSnapshotError, IncompatibleSnapshotError, OSError."""
    entry = entry_of(manifest, name)
    file = TensorFile(entry.bytes)
    read_verified_into(directory, name, entry, file.pieces())
    return file.tensors()


def entry_of(manifest: Manifest, name: str) -> FileEntry:
    """What the manifest has of a file. Raises CorruptSnapshotError where that is nothing."""
    entry = manifest.files.get(name)
    if entry is None:
        raise CorruptSnapshotError(f"{name} is not in the manifest")
    return entry


def tensor_file(rank: int) -> str:
    """The parts of tensors that `rank` has written."""
    return f"{SHARDS}/rank-{rank:05d}.safetensors"
