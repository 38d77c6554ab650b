"""Hybrid sharded data parallel (FSDP2) with live recovery: each pod holds a whole copy of the model and the optimizer,
and its ranks have the shards.

Forward and backward passes meet the ranks of the pod only, by a group that lives as long as the pod. After the backward
pass, the shards of the gradient are summed over the pods of the view, for each local rank by a group of its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ddp_trainer.client.gradients import from_first, persistent_buffers, shared_gradients, started, sum_gradients
from ddp_trainer.client.local_shards import LocalShards
from ddp_trainer.live.membership import Membership
from ddp_trainer.live.pod_group import PodGroup, any_of
from ddp_trainer.train.strategies.fsdp import FSDP


class HSDP(FSDP):
    """`fully_shard` over the ranks of a pod, and sums over the pods that train."""

    name = "hsdp"
    _membership: Membership
    _pod: PodGroup

    def recover(self, membership: Membership, pod: PodGroup | None) -> None:
        assert pod is not None
        self._membership, self._pod = membership, pod

    def mesh(self) -> DeviceMesh:
        return self._pod.mesh

    def regroup(self) -> None:
        """Shards and their group stay."""
        self._pod.known_in(self.world.rank - self._pod.rank)

    def shards(self, optimizer: torch.optim.Optimizer) -> LocalShards:
        return LocalShards(self.model, optimizer)

    @property
    def gradient_scale(self) -> float:
        # FSDP divides by the number of ranks in the pod, but the parts of a mean are to be summed.
        return float(self._pod.size)

    def share_statistics(self) -> None:
        """From the first rank of all pods; not for a model without any, which then meets no other pod here."""
        buffers = list(persistent_buffers(self.model))
        if buffers and self.world.size > 1:
            with self._pod.together():
                from_first(buffers, self._membership.waited)

    def reduce_gradients(self) -> None:
        """Sum the shards of the gradient over the pods, on all ranks of the view or on none that goes on.

        The sums of one local rank may end and those of another fail, and a pod with both would have half a gradient. So
        all ranks of the view meet once their sums have ended. Where that ends on any rank, each has its whole sum; so
        if it does on one rank of a pod, all ranks of that pod take the step. Raises ViewLost on all of them otherwise.
        """
        if self.world.size == self._pod.size:
            return
        with self._pod.together(any_of):
            self._sum_over_pods()
            self._meet()

    @torch.no_grad()
    def _sum_over_pods(self) -> None:
        wait, replicas = self._membership.waited, self._membership.replicas
        gradients = shared_gradients(self.model.parameters(), self.world.device, wait, replicas)
        shards = [_local(gradient) for gradient in gradients]
        sum_gradients([shard for shard in shards if shard.numel()], wait, replicas)

    def _meet(self) -> None:
        self._membership.waited(started(dist.all_reduce(torch.zeros(1, device="cpu"), async_op=True)))


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
