"""From live objects to the files of a snapshot and back.

A snapshot holds `state.json`, the structure of every state, and one `<name>.safetensors` for each state that has
tensors. Saving has two halves: `Staging.stage` copies what training is about to change into buffers that are reused
from save to save, and `Staged.write` turns those into files, later and in another thread. Loading reads each file once:
the bytes that were verified are the bytes used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from ddp_trainer.snapshots.codec.structure import decode, encode, to_json
from ddp_trainer.snapshots.codec.tensorfile import Buffers, TensorFile, chunks
from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.errors import IncompatibleSnapshotError
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest
from ddp_trainer.snapshots.trust.verify import read_verified_into, verify_files

STRUCTURE = "state.json"
TENSORS = ".safetensors"
SHARDS = "shards"
"""The folder that all ranks write into."""
RNG = "rng"
_VERSION = 1
_ACCELERATED = {"AcceleratedOptimizer": "optimizer", "AcceleratedScheduler": "scheduler"}


class PlainFile:
    """A file in memory as it is."""

    def __init__(self, size: int) -> None:
        self._data = memoryview(bytearray(size))

    def pieces(self) -> Iterator[memoryview]:
        """All of it in one, to be filled or sent."""
        yield self._data


File = PlainFile | TensorFile


@runtime_checkable
class Stateful(Protocol):
    """An object that a snapshot restores: a module, an optimizer, a scheduler, a scaler, a data cursor."""

    def state_dict(self) -> Mapping[str, Any]:
        """Everything that must be the same after a resume."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over what `state_dict` returned."""
        ...


def unwrapped(value: Stateful) -> Stateful:
    """The model inside DistributedDataParallel, DataParallel or torch.compile, and the optimizer or scheduler inside
    accelerate's; anything else as it is.
    """
    while True:
        if isinstance(value, nn.parallel.DistributedDataParallel | nn.DataParallel):
            value = value.module
        elif isinstance(inner := getattr(value, "_orig_mod", None), nn.Module):
            value = inner
        elif (attribute := _ACCELERATED.get(type(value).__qualname__)) and type(value).__module__.startswith(
            "accelerate."
        ):
            value = getattr(value, attribute)
        else:
            return value


@dataclass(frozen=True)
class Staged:
    """A copy of all states, ready to be written, in the buffers of its Staging until the next `stage`."""

    states: Mapping[str, Any]
    """State name -> what `encode` made of it."""
    files: Mapping[str, tuple[bytes, Tensor]]
    """File name -> header and data, a flat uint8 tensor in host memory."""

    @cached_property
    def structure(self) -> bytes:
        """state.json. For the thread that writes: deferred values are computed here."""
        return to_json({"version": _VERSION, "states": self.states})

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the files of tensors: nearly all of a large state, and known before `structure` is."""
        return sum(len(header) + data.numel() for header, data in self.files.values())

    @property
    def total_bytes(self) -> int:
        """Bytes that `write` is going to write. For the thread that writes."""
        return len(self.structure) + self.tensor_bytes

    def write(self, directory: Path, disk: Disk | None = None) -> dict[str, FileEntry]:
        """Write the files into `directory`, and return what they are by name. Raises OSError."""
        disk = disk or Disk()
        files = {
            name: disk.create(directory / name, chunks(header, data)) for name, (header, data) in self.files.items()
        }
        return files | {STRUCTURE: disk.create(directory / STRUCTURE, [self.structure])}


class Staging:
    """Copies states into buffers of its own, which the next `stage` uses again."""

    def __init__(self) -> None:
        self._buffers = Buffers()

    def stage(self, states: Mapping[str, Any]) -> Staged:
        """Copy `states` (name -> state_dict). Training may change them as soon as this returns.

        Raises SnapshotError for a value that a snapshot cannot hold.
        """
        structure: dict[str, Any] = {}
        files: dict[str, tuple[bytes, Tensor]] = {}
        for name, state in states.items():
            tensors: dict[str, Tensor] = {}
            structure[name] = encode(state, "", tensors)
            if tensors:
                files[f"{name}{TENSORS}"] = self._buffers.copy(name, tensors)
        return Staged(structure, files)


def file_in_memory(name: str, size: int) -> File:
    """Memory for a file of a snapshot; its `pieces` are to be filled."""
    return TensorFile(size) if name.endswith(TENSORS) else PlainFile(size)


def read_files(
    directory: Path, manifest: Manifest, *, check_shards: bool = True, on_read: Callable[[], None] = lambda: None
) -> dict[str, File]:
    """The files of a snapshot that every rank needs, in memory, verified as they were read.

    The shards, of which a rank needs few, are only verified, by rank 0 for all. Calls `on_read` again and again while
    bytes arrive. Raises CorruptSnapshotError, OSError.
    """
    if check_shards:
        verify_files(directory, manifest.with_files(_files(manifest, shards=True)), on_read)
    files = {}
    for name, entry in _files(manifest, shards=False).items():
        files[name] = file_in_memory(name, entry.bytes)
        read_verified_into(directory, name, entry, _noted(files[name].pieces(), on_read))
    return files


def _noted(pieces: Iterator[memoryview], on_read: Callable[[], None]) -> Iterator[memoryview]:
    """The same pieces; each is asked for when the one before is filled."""
    for piece in pieces:
        on_read()
        yield piece


def parse_files(files: dict[str, File]) -> dict[str, Any]:
    """The states in verified files by name; takes the files out of `files` one by one, so that memory holds them but
    once.
    """
    try:
        structure = json.loads(b"".join(files.pop(STRUCTURE).pieces()))
        if structure["version"] != _VERSION:
            raise IncompatibleSnapshotError(
                f"{STRUCTURE} is of version {structure['version']}, this image reads {_VERSION}"
            )
        states = {}
        for name, state in structure["states"].items():
            file = files.pop(f"{name}{TENSORS}", None)
            states[name] = decode(state, file.tensors() if isinstance(file, TensorFile) else {})
    except (KeyError, TypeError, ValueError) as error:
        raise IncompatibleSnapshotError(f"{STRUCTURE} is not what this image writes: {error!r}") from error
    return states


def _files(manifest: Manifest, *, shards: bool) -> dict[str, FileEntry]:
    return {name: entry for name, entry in manifest.files.items() if name.startswith(f"{SHARDS}/") == shards}
