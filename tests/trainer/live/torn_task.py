"""A task in which a step ends on some ranks of a pod and fails on others, as where a rank of another pod dies then."""

from __future__ import annotations

import os
from typing import Any

import torch
from live_tasks import Slow
from torch import Tensor

from ddp_trainer.client.sharing import Sharing
from ddp_trainer.snapshots.codec.state import SHARDS
from ddp_trainer.train.strategies.hsdp import HSDP

TORN_AT = 10


class Torn(Slow):
    """Slow, for two pods of two ranks. In step TORN_AT, `sum`: one rank has no sum of its shard. `meet`: all have it,
    and only one comes to know that. `share`: the same, and one rank of the pod that is behind does not get its shard of
    the other one, which its pod has all else of, the first time.
    """

    def __init__(self, torn: str) -> None:
        super().__init__(ranks=4)
        self._passes = 0
        rank = 2 * int(os.environ["DDPJOB_NODE_RANK"]) + int(os.environ["LOCAL_RANK"])
        if torn == "sum" and rank == 2:
            self._tear("_sum_over_pods", is_after=False)
        elif torn != "sum" and rank != 0:
            self._tear("_meet", is_after=True)
        if torn == "share" and rank == 2:
            _tear_share()

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        self._passes += torch.is_grad_enabled()
        return super().loss(output, batch)

    def _tear(self, name: str, *, is_after: bool) -> None:
        whole = getattr(HSDP, name)

        def torn(strategy: Any) -> None:
            if is_after:
                whole(strategy)
            if self._passes == TORN_AT:
                self._passes += 1
                raise RuntimeError("Connection closed by peer")
            if not is_after:
                whole(strategy)

        setattr(HSDP, name, torn)


def _tear_share() -> None:
    whole = Sharing.states

    def torn(sharing: Sharing, states: Any, *args: Any, **named: Any) -> Any:
        if SHARDS in states:
            Sharing.states = whole  # type: ignore[method-assign]
            raise RuntimeError("Connection closed by peer")
        return whole(sharing, states, *args, **named)

    Sharing.states = torn  # type: ignore[method-assign]
