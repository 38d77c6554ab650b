"""torchrun's static rendezvous, with one difference: MASTER_ADDR is the address of node rank 0 for all ranks.

By itself it gives the ranks of a node the address that the node connects to, as of torch 2.13. For all nodes but the
first that is the job's Service, which has one port, and a script may open a store at another one, such as
MASTER_PORT + 1. torchrun's c10d rendezvous shares the address in the same way.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Final, cast

from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous, create_rdzv_handler

BACKEND: Final = "ddpjob"
"""What torchrun knows it by."""


class Rendezvous(StaticTCPRendezvous):
    """Shares node rank 0's address through its store."""

    def get_backend(self) -> str:
        """As torchrun has it from its arguments."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises what the store does that is away or silent."""
        joined = super().next_rendezvous()
        if self.world_size == 1:
            return joined
        address = RendezvousStoreInfo.build(self.rank, joined.store, self.master_addr, self.master_port)
        return RendezvousInfo(joined.store, joined.rank, joined.world_size, address)


def create(parameters: RendezvousParameters) -> Rendezvous:
    """For torchrun's registry."""
    made = cast("StaticTCPRendezvous", create_rdzv_handler(parameters))
    seconds = int(made.timeout.total_seconds())
    rank = int(made.rank)  # from a text
    return Rendezvous(made.master_addr, made.master_port, rank, made.world_size, made.run_id, seconds)


def use(arguments: Namespace) -> None:
    """Have torchrun take this one in place of the static one that its parsed `arguments` name."""
    rendezvous_handler_registry.register(BACKEND, create)
    arguments.rdzv_conf = f"{arguments.rdzv_conf},rank={arguments.node_rank}"
    arguments.rdzv_backend, arguments.node_rank = BACKEND, 0  # torchrun has a node rank for the static one alone
