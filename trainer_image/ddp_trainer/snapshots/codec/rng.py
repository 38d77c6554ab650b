"""The random number generators of one rank as a uint8 tensor, so that ranks can gather them without pickling.

Covered are the global generators that training draws from: torch on the CPU and on the current CUDA device, NumPy's
legacy one, and Python's. A rank without CUDA leaves that part empty but there, so that the length is the same on
every rank.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import random
import struct
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots.trust.errors import IncompatibleSnapshotError

_CUDA_BYTES = 16  # seed and offset of the Philox generator
_NUMPY = struct.Struct("<624Iq?d")
_PYTHON = struct.Struct("<625Id")
_HEAD = struct.Struct("<II?")  # version, bytes of torch's CPU state, whether the CUDA part is filled
_VERSION = 1
_MT19937_BYTES: Final = 625 * 4
"""Of `mt19937_state` (numpy/random/src/mt19937/mt19937.h): its keys and its position."""


def capture() -> Tensor:
    """This process's generators, now."""
    return _packed(*_torch(), _numpy(), random.getstate())


class Captures:
    """`capture`, again and again: the same tensor for as long as nothing is drawn, at a fifth of the cost."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._newest: Tensor | None = None

    def capture(self) -> Tensor:
        """This process's generators, now. Nobody may write to the tensor."""
        cpu, cuda = _torch()
        python = random.getstate()
        seen = (cpu, cuda, python, _numpy_memory())
        if self._newest is None or seen != self._seen:
            numpy = _numpy()
            self._newest = _packed(cpu, cuda, numpy, python)
            # to draw the second of a pair of normal numbers changes only that there is one
            has_second = numpy[3]
            self._seen = () if has_second else seen
        return self._newest


def _torch() -> tuple[bytes, bytes | None]:
    """The states of torch's generators: that of the CPU, and that of a CUDA device in use."""
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.get_rng_state().numpy().tobytes(), torch.cuda.get_rng_state().numpy().tobytes() if has_cuda else None


def _numpy() -> Any:
    """The name, the keys, the position, whether there is a second normal number, and that number."""
    _numpy_memory()
    return np.random.get_state(legacy=True)


def _numpy_memory() -> bytes:
    """All of `_numpy` but the second normal number, in a tenth of the time."""
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, and not in the stubs
    if not isinstance(generator, np.random.MT19937):
        raise UserError(
            f"np.random draws from {type(generator).__name__} (np.random.set_bit_generator), and a snapshot holds the "
            "state of MT19937 alone: leave that call out, and draw from a generator of your own, such as "
            "np.random.default_rng(seed)"
        )
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _packed(cpu: bytes, cuda: bytes | None, numpy: Any, python: tuple[Any, ...]) -> Tensor:
    _, keys, position, has_second, second = numpy
    _, words, gauss = python
    parts = (
        _HEAD.pack(_VERSION, len(cpu), cuda is not None),
        cpu,
        cuda or bytes(_CUDA_BYTES),
        _NUMPY.pack(*keys.tolist(), position, bool(has_second), second),
        _PYTHON.pack(*words, math.nan if gauss is None else gauss),
    )
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


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
