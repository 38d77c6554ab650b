"""Tensors as a safetensors file, laid out once so that later saves are plain copies into the same buffer.

The format (github.com/huggingface/safetensors, "Format"): 8 bytes of header length, little endian; a JSON header,
padded with spaces to a multiple of 8; the tensors' bytes without a gap. The library builds a second copy of
everything in memory before it writes and hides ENOSPC behind an error of its own; here the buffer that training was
copied into is what is written.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_trainer.snapshots.errors import IncompatibleSnapshotError, SnapshotError

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
    return Layout(struct.pack("<Q", len(text)) + text, slots, position)


def parse(file: bytearray, *, copy: bool = True) -> dict[str, Tensor]:
    """The tensors of a safetensors file, each in memory of its own, or without `copy` as views of `file`.

    A view is aligned only to its element size, and some kernels' results depend on alignment. Raises
    IncompatibleSnapshotError for a file that is not in the format: its bytes are verified, so it was written so.
    """
    try:
        (length,) = struct.unpack_from("<Q", file)
        if length > min(_MAX_HEADER, len(file) - 8):
            raise ValueError(f"header of {length} bytes in a file of {len(file)}")
        header = json.loads(file[8 : 8 + length])
        data_bytes = len(file) - 8 - length
        data = (
            torch.frombuffer(file, dtype=torch.uint8, offset=8 + length)
            if data_bytes
            else torch.empty(0, dtype=torch.uint8)
        )
        views = {name: _slot(entry, data_bytes).view(data) for name, entry in header.items() if name != "__metadata__"}
        return {name: view.clone() for name, view in views.items()} if copy else views
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error) as error:
        raise IncompatibleSnapshotError(f"not a safetensors file that can be read: {error}") from error


def _slot(entry: dict[str, object], data_bytes: int) -> Slot:
    dtype = DTYPES[str(entry["dtype"])]
    shape = torch.Size(entry["shape"])  # type: ignore[arg-type]
    begin, end = entry["data_offsets"]  # type: ignore[misc]
    if not 0 <= begin <= end <= data_bytes or end - begin != math.prod(shape) * dtype.itemsize:  # type: ignore[has-type]
        raise ValueError(f"a tensor of shape {list(shape)} at bytes {begin} to {end} of {data_bytes}")  # type: ignore[has-type]
    return Slot(dtype, shape, begin, end)  # type: ignore[has-type]
