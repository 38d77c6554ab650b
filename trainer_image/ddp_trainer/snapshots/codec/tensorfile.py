"""Tensors as a safetensors file, laid out once so that later saves are plain copies into the same buffer, and read
straight to where they stay.

The format (github.com/huggingface/safetensors, "Format"): 8 bytes of header length, little endian; a JSON header,
padded with spaces to a multiple of 8; the tensors' bytes without a gap. The library builds a second copy of
everything in memory before it writes and hides ENOSPC behind an error of its own; here the buffer that training was
copied into is what is written.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from ddp_trainer.snapshots.trust.disk import Chunk
from ddp_trainer.snapshots.trust.errors import IncompatibleSnapshotError, SnapshotError

log = logging.getLogger(__name__)

DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000  # the library's own limit


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a type that it has; KeyError for one that it has not."""
    return _NAMES[dtype]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in the data part."""

    dtype: torch.dtype
    shape: torch.Size
    begin: int
    end: int

    def view(self, data: Tensor) -> Tensor:
        """The tensor inside `data`, a flat uint8 tensor of the whole data part; shares its memory."""
        return data[self.begin : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The header's bytes and the place of each tensor; `data_bytes` is the size of the data part."""

    header: bytes
    slots: Mapping[str, Slot]
    data_bytes: int


def lay_out(tensors: Mapping[str, Tensor]) -> Layout:
    """Place tensors by falling element size, so that each is aligned to its own. Raises SnapshotError for a dtype
    without a name.
    """
    slots: dict[str, Slot] = {}
    header: dict[str, object] = {}
    position = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            raise SnapshotError(
                f"{name} is a {tensor.layout} tensor of {tensor.dtype}, which a snapshot cannot hold: "
                "return a dense tensor of a common type from state_dict()"
            )
        end = position + tensor.numel() * tensor.element_size()
        slots[name] = Slot(tensor.dtype, tensor.shape, position, end)
        header[name] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Layout(_LENGTH.pack(len(text)) + text, slots, position)


class TensorFile:
    """A safetensors file of `size` bytes in host memory, each tensor in memory of its own.

    Of its own, because optimizers keep the tensors that they are given, and because some kernels' results depend on
    how memory is aligned.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._pieces: list[memoryview] = []
        self._tensors: dict[str, Tensor] = {}
        self._problem: Exception | None = None

    def pieces(self) -> Iterator[memoryview]:
        """The memory of the file from its first byte to its last, to be filled, or sent when it has been.

        Each must be filled before the next is asked for: what was read so far says where the rest belongs.
        """
        if not self._pieces:
            yield from self._lay_out()
        else:
            yield from self._pieces

    def tensors(self) -> dict[str, Tensor]:
        """The tensors. Raises IncompatibleSnapshotError for a file that is not in the format: its bytes are verified,
        so it was written so.
        """
        if self._problem is not None or not self._pieces:
            raise IncompatibleSnapshotError(f"not a safetensors file that can be read: {self._problem}")
        return self._tensors

    def _lay_out(self) -> Iterator[memoryview]:
        read = 0

        def piece(memory: memoryview) -> memoryview:
            nonlocal read
            read += len(memory)
            self._pieces.append(memory)
            return memory

        try:
            if self._size < _LENGTH.size:
                raise ValueError(f"{self._size} bytes are too few for a header")
            yield (length := piece(memoryview(bytearray(_LENGTH.size))))
            (header_bytes,) = _LENGTH.unpack(length)
            if header_bytes > min(_MAX_HEADER, self._size - read):
                raise ValueError(f"header of {header_bytes} bytes in a file of {self._size}")
            yield (header := piece(memoryview(bytearray(header_bytes))))
            # Nothing is verified yet: memory is asked for only once the places add up to the file's size.
            places = _places(bytes(header), self._size - read)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._problem = error
            places = {}
        for name, slot in places.items():
            self._tensors[name] = tensor = torch.empty(slot.shape, dtype=slot.dtype, device="cpu")
            if tensor.numel():
                yield piece(memoryview(tensor.view(-1).view(torch.uint8).numpy()).cast("B"))  # type: ignore[arg-type]
        if read < self._size:
            # The file is not in the format; whether it is the one that was written is for its checksum to say.
            yield piece(memoryview(bytearray(self._size - read)))


def _places(header: bytes, data_bytes: int) -> dict[str, Slot]:
    """The tensors in the order of their bytes, which leave no gap and do not overlap. Raises ValueError and others."""
    slots = {name: _slot(entry, data_bytes) for name, entry in json.loads(header).items() if name != "__metadata__"}
    places = dict(sorted(slots.items(), key=lambda item: (item[1].begin, item[1].end)))
    position = 0
    for name, slot in places.items():
        if slot.begin != position:
            raise ValueError(f"{name} begins at byte {slot.begin}, the one before ends at {position}")
        position = slot.end
    if position != data_bytes:
        raise ValueError(f"the tensors end at byte {position} of {data_bytes}")
    return places


def _slot(entry: dict[str, Any], data_bytes: int) -> Slot:
    dtype = DTYPES[str(entry["dtype"])]
    shape = torch.Size(entry["shape"])
    begin, end = entry["data_offsets"]
    is_inside = 0 <= begin <= end <= data_bytes
    if not is_inside or min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {list(shape)} at bytes {begin} to {end} of {data_bytes}")
    return Slot(dtype, shape, begin, end)


_BLOCK = 8 << 20
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class Buffers:
    """One buffer a file, laid out as the file, while the tensors' names, types and shapes stay the same.

    Pinned where a source is CUDA, so that the copy runs at the speed of the bus.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[object, Layout, Memory, dict[str, Tensor]]] = {}

    @torch.no_grad()
    def copy(self, file: str, tensors: Mapping[str, Tensor]) -> tuple[bytes, Tensor]:
        """Header and data, flat uint8, of a safetensors file of `tensors`; valid until the next copy to `file`.

        Raises SnapshotError for a tensor that the format cannot hold.
        """
        layout, data, views = self._buffer(file, tensors)
        for key, tensor in tensors.items():
            # of other devices (MPS, XPU, Gaudi) nothing would wait for it below
            views[key].copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return layout.header, data

    def _buffer(self, file: str, tensors: Mapping[str, Tensor]) -> tuple[Layout, Tensor, dict[str, Tensor]]:
        pinned = any(tensor.is_cuda for tensor in tensors.values())
        signature = (pinned, [(key, tensor.dtype, tensor.shape) for key, tensor in tensors.items()])
        held = self._held.get(file)
        if held is None or held[0] != signature:
            layout = lay_out(tensors)
            if held is not None:
                # give the old memory back before asking for the new
                del self._held[file]
                held[2].release()
                held = None
            memory = Memory(layout.data_bytes, pinned=pinned)
            views = {key: slot.view(memory.data) for key, slot in layout.slots.items()}
            held = self._held[file] = (signature, layout, memory, views)
        return held[1], held[2].data, held[3]


class Memory:
    """`data`, flat uint8, of exactly so many bytes of host memory.

    torch's own `pin_memory` takes the next power of two (ATen's CachingHostAllocator): 128 GiB for a state of 70.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        self._unpin: finalize[[int], Memory] | None = None
        if not pinned or size == 0:
            self.data = torch.empty(size, dtype=torch.uint8, device="cpu")
            return
        # pages of its own: CUDA pins whole pages, and refuses one that is pinned already
        self.data = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        address = self.data.data_ptr()
        try:
            _checked("cudaHostRegister", address, size, _PORTABLE)
        except RuntimeError as error:  # as in WSL, or in a sandbox
            _forget_error()
            log.warning("memory for snapshots cannot be pinned, so that copies from the device take longer: %s", error)
            return
        # CUDA would keep the pages of memory that is freed, and take what comes to have its addresses for them
        self._unpin = finalize(self, _unregister, address)
        self._unpin.atexit = False

    def release(self) -> None:
        """Unpin it. No copy to it may be under way."""
        if self._unpin is not None:
            self._unpin()


def _unregister(address: int) -> None:
    try:
        _checked("cudaHostUnregister", address)
    except RuntimeError as error:
        log.warning("memory of a snapshot stays pinned: %s", error)
        _forget_error()


def _checked(function: str, *arguments: int) -> None:
    """Call a function of CUDA's runtime. Raises CudaError, a RuntimeError."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(getattr(runtime, function)(*arguments)))


def _forget_error() -> None:
    """CUDA's runtime keeps the last error of a thread until somebody asks for it: torch does after each kernel, and the
    next one of training would fail of what failed here.
    """
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def chunks(header: bytes, data: Tensor) -> Iterator[Chunk]:
    """The bytes of a file in pieces that are written without a copy."""
    yield header
    view = memoryview(data.numpy()).cast("B")  # type: ignore[arg-type]
    for start in range(0, len(view), _BLOCK):
        yield view[start : start + _BLOCK]
