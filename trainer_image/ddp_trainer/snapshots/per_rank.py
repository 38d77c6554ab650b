"""States of which each rank has its own, such as a data loader's: all ranks' together are one state of the snapshot.

They are small. Before a save they are gathered, as JSON in which tensors are text, and rank 0 writes them; after a load
each rank takes its own. With another number of ranks there is no own: the program begins with what it has, and an event
says so.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots.codec.loading import load_into
from ddp_trainer.snapshots.codec.state import Stateful
from ddp_trainer.snapshots.codec.structure import decode, encode
from ddp_trainer.snapshots.ranks import Ranks

MOST_BYTES: Final = 4 << 20
"""Of one rank's state as JSON."""


class PerRank:
    """Rank 0 saves what `gather` has brought together. `notice` is what to say about a load, if anything."""

    def __init__(self, name: str, value: Stateful, ranks: Ranks) -> None:
        self.notice: str | None = None
        self._name = name
        self._value = value
        self._ranks = ranks
        self._gathered: list[str] = []

    def gather(self) -> None:
        """Bring all ranks' states together: a collective. Raises UserError on all ranks for one that is too large or
        that a snapshot cannot hold.
        """
        text, problem = "", None
        try:
            text = packed(self._value)
        except Exception as error:  # on this rank alone: the others wait for what it has to say
            problem = f"cannot be saved: {str(error) or type(error).__name__}"
        if len(text) > MOST_BYTES:
            problem = (
                f"has {len(text):,} bytes; a state of each rank may have {MOST_BYTES:,}. Keep in it only what tells "
                "where the rank stands"
            )
        for rank, found in enumerate(self._ranks.problems(problem)):
            if found is not None:
                raise UserError(f"{self._name} of rank {rank} {found}")
        self._gathered = self._ranks.values(text)

    def state_dict(self) -> Mapping[str, Any]:
        """As gathered last."""
        return {"ranks": self._gathered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over this rank's own."""
        states = state["ranks"]
        if len(states) == self._ranks.world_size:
            load_into(self._value, unpacked(states[self._ranks.rank]))
            return
        self.notice = (
            f"{self._name} is of {len(states)} ranks, one each, and this is {self._ranks.world_size}: each begins with "
            "the one that the program has made"
        )


def packed(value: Stateful) -> str:
    """A state as one line of text. Raises SnapshotError for a value that a snapshot cannot hold."""
    tensors: dict[str, Tensor] = {}
    structure = encode(value.state_dict(), "", tensors)
    return json.dumps({"structure": structure, "tensors": {name: _text(tensor) for name, tensor in tensors.items()}})


def unpacked(text: str) -> Any:
    """The state that `packed` made the text of."""
    value = json.loads(text)
    return decode(value["structure"], {name: _tensor(*parts) for name, parts in value["tensors"].items()})


def _text(tensor: Tensor) -> list[Any]:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64.b64encode(data).decode()]


def _tensor(dtype: str, shape: list[int], text: str) -> Tensor:
    data = bytearray(base64.b64decode(text))
    kind: torch.dtype = getattr(torch, dtype)
    return (torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind, device="cpu")).reshape(shape)
