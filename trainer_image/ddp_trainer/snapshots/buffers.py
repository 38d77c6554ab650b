"""Host memory that training is copied into, reused from save to save: allocating it anew costs more than the copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ddp_trainer.snapshots.disk import Chunk
from ddp_trainer.snapshots.tensorfile import Layout, lay_out

_BLOCK = 8 << 20


class Buffers:
    """One buffer a file, laid out as the file, while the tensors' names, types and shapes stay the same.

    Pinned where a source is CUDA, so that the copy runs at the speed of the bus.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[object, Layout, Tensor, dict[str, Tensor]]] = {}

    @torch.no_grad()
    def copy(self, file: str, tensors: Mapping[str, Tensor]) -> tuple[bytes, Tensor]:
        """Header and data, flat uint8, of a safetensors file of `tensors`; valid until the next copy to `file`.

        Raises SnapshotError for a tensor that the format cannot hold.
        """
        layout, data, views = self._buffer(file, tensors)
        for key, tensor in tensors.items():
            views[key].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return layout.header, data

    def _buffer(self, file: str, tensors: Mapping[str, Tensor]) -> tuple[Layout, Tensor, dict[str, Tensor]]:
        pinned = any(tensor.is_cuda for tensor in tensors.values())
        signature = (pinned, [(key, tensor.dtype, tensor.shape) for key, tensor in tensors.items()])
        held = self._held.get(file)
        if held is None or held[0] != signature:
            layout = lay_out(tensors)
            self._held.pop(file, None)  # give the old memory back before asking for the new
            data = torch.empty(layout.data_bytes, dtype=torch.uint8, pin_memory=pinned)
            views = {key: slot.view(data) for key, slot in layout.slots.items()}
            held = self._held[file] = (signature, layout, data, views)
        return held[1], held[2], held[3]


def chunks(header: bytes, data: Tensor) -> Iterator[Chunk]:
    """The bytes of a file in pieces that are written without a copy."""
    yield header
    view = memoryview(data.numpy()).cast("B")  # type: ignore[arg-type]
    for start in range(0, len(view), _BLOCK):
        yield view[start : start + _BLOCK]
