"""The random number generators of one rank as a uint8 tensor, so that ranks can gather them without pickling.

Covered are the global generators that training draws from: torch on the CPU and on the current CUDA device, NumPy's
legacy one, and Python's. A rank without CUDA leaves that part empty but there, so that the length is the same on
every rank.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct

import numpy as np
import torch
from torch import Tensor

from ddp_trainer.snapshots.trust.errors import IncompatibleSnapshotError

_CUDA_BYTES = 16  # seed and offset of the Philox generator
_NUMPY = struct.Struct("<624Iq?d")
_PYTHON = struct.Struct("<625Id")
_HEAD = struct.Struct("<II?")  # version, bytes of torch's CPU state, whether the CUDA part is filled
_VERSION = 1


def capture() -> Tensor:
    """This process's generators, now."""
    cpu = bytes(torch.get_rng_state().numpy())
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = bytes(torch.cuda.get_rng_state().numpy()) if has_cuda else bytes(_CUDA_BYTES)
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy = _NUMPY.pack(*keys.tolist(), position, bool(has_gauss), cached)  # type: ignore[union-attr]
    _, words, gauss = random.getstate()
    python = _PYTHON.pack(*words, math.nan if gauss is None else gauss)
    blob = _HEAD.pack(_VERSION, len(cpu), has_cuda) + cpu + cuda + numpy + python
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8)


def restore(state: Tensor) -> None:
    """Set the generators as they were at `capture`. Raises IncompatibleSnapshotError for what this version does not
    know.
    """
    blob = bytes(state.contiguous().numpy())
    version, cpu_bytes, has_cuda = _HEAD.unpack_from(blob)
    if version != _VERSION or len(blob) != _HEAD.size + cpu_bytes + _CUDA_BYTES + _NUMPY.size + _PYTHON.size:
        raise IncompatibleSnapshotError(f"its random number state is of version {version}, this image reads {_VERSION}")
    cpu, cuda, numpy, python = _split(blob[_HEAD.size :], cpu_bytes, _CUDA_BYTES, _NUMPY.size, _PYTHON.size)
    torch.set_rng_state(_tensor(cpu))
    if torch.cuda.is_available() and has_cuda:
        torch.cuda.set_rng_state(_tensor(cuda))
    *keys, position, has_gauss, cached = _NUMPY.unpack(numpy)
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, int(has_gauss), cached))
    *words, gauss = _PYTHON.unpack(python)
    random.setstate((3, tuple(words), None if math.isnan(gauss) else gauss))


def reseed(state: Tensor, *, step: int, rank: int, world_size: int) -> None:
    """Start generators anew where the snapshot has none for this rank, the same way at each resume at this size.

    `state` is rank 0's captured state: it carries the run's seed and history.
    """
    digest = hashlib.sha256(bytes(state.contiguous().numpy()) + f"{step}/{rank}/{world_size}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    random.seed(digest)


def _split(blob: bytes, *sizes: int) -> list[bytes]:
    parts = []
    for size in sizes:
        parts.append(blob[:size])
        blob = blob[size:]
    return parts


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
