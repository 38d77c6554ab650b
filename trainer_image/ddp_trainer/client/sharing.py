"""States on their way from one rank to the others of a group, where these have not finished the same steps.

Collectives are started here and waited for by `wait`, which notices a lost rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.client.gradients import Wait, started
from ddp_trainer.snapshots.codec.state import STRUCTURE, Staging, Stateful, file_in_memory, parse_files


class Sharing:
    """Between all ranks of `group`, by default of the view; `source` is the rank in it that sends."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._staging = Staging()

    def states(
        self, states: Mapping[str, Stateful], source: int, *, is_behind: bool, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Send those of `source` to all; what a rank that `is_behind` is to load into its own, by their names."""
        sizes: dict[str, int] = {}
        contents: dict[str, tuple[bytes, Tensor]] = {}
        if dist.get_rank(group) == source:
            staged = self._staging.stage({name: _plain(name, value) for name, value in states.items()})
            structure = torch.frombuffer(bytearray(staged.structure), dtype=torch.uint8)
            contents = {**staged.files, STRUCTURE: (b"", structure)}
            sizes = {name: len(header) + data.numel() for name, (header, data) in contents.items()}
        sizes = json.loads(self.text(json.dumps(sizes).encode(), source, group))
        files = {}
        for name, size in sorted(sizes.items()):
            content = torch.empty(size, dtype=torch.uint8, device="cpu")
            if name in contents:
                header, data = contents[name]
                content = torch.cat([torch.frombuffer(bytearray(header), dtype=torch.uint8), data]) if header else data
            self.tensor(content, source, group)
            if is_behind:
                files[name] = file_in_memory(name, size)
                position = 0
                for piece in files[name].pieces():
                    piece[:] = content[position : position + len(piece)].numpy().data
                    position += len(piece)
        return parse_files(files) if is_behind else {}

    def text(self, data: bytes, source: int, group: dist.ProcessGroup | None = None) -> bytes:
        """That of `source`, on all ranks."""
        size = torch.tensor([len(data)], device="cpu")
        self.tensor(size, source, group)
        content = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        if dist.get_rank(group) == source:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.tensor(content, source, group)
        return bytes(content.numpy())

    def tensor(self, content: Tensor, source: int, group: dist.ProcessGroup | None = None) -> None:
        """Fill `content`, of the same length everywhere, with that of `source`."""
        self._wait(started(dist.broadcast(content, group_src=source, group=group, async_op=True)))


def _plain(name: str, value: Stateful) -> Mapping[str, Any]:
    """Lines that wait for the volume are written by the rank that has them, not by those that take over its state."""
    state = dict(value.state_dict())
    return {**state, "waiting": []} if "waiting" in state else state
