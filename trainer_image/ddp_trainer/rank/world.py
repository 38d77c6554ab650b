"""The ranks and how they meet: which one this is, on which device, in which process group.

torchrun describes them in the environment; without it there is one rank. The process group is left in order
only after success: after a failure some rank may never arrive, and a barrier in a `finally` would wait for it
instead of letting the error out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.rendezvous import rendezvous

from ddp_trainer.contract.environment import parse_rank
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.standard_error import say
from ddp_trainer.rank.fresh_store import fresh_store

CPU: Final = torch.device("cpu")
DEVICES: Final = Path("/dev")


@dataclass(slots=True)
class World:
    """This rank among all of them. `local_rank` counts within a node and picks its device.

    After a live recovery `rank` and `size` are those of the new view: hold the World, not its numbers.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = CPU

    def move(self, rank: int, size: int) -> None:
        """To another place among the ranks, or among fewer or more of them."""
        self.rank, self.size = rank, size

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def leads(self) -> bool:
        """Whether this is the one rank that writes logs. By global rank: each node has a local rank 0."""
        return self.rank == 0


def describe_world(environ: Mapping[str, str] | None = None, *, device: str = "auto") -> World:
    """The world that torchrun's variables describe, with `device` one of auto, cpu and cuda.

    Raises UserError when CUDA is asked for and there is none, or fewer devices than ranks on this node.
    """
    environ = os.environ if environ is None else environ
    own = parse_rank(environ)
    devices = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and not devices:
        raise UserError(
            "--device cuda, but torch sees no CUDA device here: use the CUDA image on a GPU node, or --device cpu"
        )
    if devices and own.local_rank >= devices:
        raise UserError(
            f"local rank {own.local_rank} has no device of its own: this node has {devices} for "
            f"{own.local_world_size} ranks; start at most one rank a GPU"
        )
    if device == "auto" and not devices and own.local_rank == 0 and (present := gpus_present(environ)):
        say(f"ddp_trainer: training runs on the CPU: this node has {present} GPU(s), and {why_unseen()}")
    return World(
        rank=own.rank,
        size=own.world_size,
        local_rank=own.local_rank,
        device=torch.device("cuda", own.local_rank) if devices else torch.device("cpu"),
    )


def gpus_present(environ: Mapping[str, str]) -> int:
    """GPUs that this container was given, whether torch can use them or not: NVIDIA's, and for a torch with ROCm also
    AMD's; 0 where a variable such as CUDA_VISIBLE_DEVICES hides them.
    """
    chosen = [environ.get(f"{name}_VISIBLE_DEVICES") for name in ("CUDA", "HIP", "ROCR")]
    if any(value is not None and re.match(r"\s*(\d|GPU-|MIG-)", value) is None for value in chosen):
        return 0
    present = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in DEVICES.glob("nvidia*"))
    if torch.version.hip is not None and (DEVICES / "kfd").exists():
        present += sum(1 for _ in DEVICES.glob("dri/renderD*"))
    return present


def why_unseen() -> str:
    """Why torch, which sees no GPU, sees none, and what to do."""
    if torch.version.hip is not None and (DEVICES / "kfd").exists():
        return (
            "ROCm does not start on them: give this user the groups of /dev/kfd and /dev/dri/renderD* on the node, by "
            "their numbers (supplementalGroups in the pod's securityContext), or look at the node's driver"
        )
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA: use the trainer image with CUDA, or --device cpu, and "
            "leave the GPUs to others"
        )
    return f"CUDA {torch.version.cuda} does not start on them: see its warning, and the node's driver (nvidia-smi)"


@contextmanager
def process_group(world: World, *, timeout_seconds: float) -> Iterator[None]:
    """Join all ranks, and leave together once the block has succeeded."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    dist.init_process_group(
        world.backend,
        timeout=timedelta(seconds=timeout_seconds),
        store=_store(world, timeout_seconds),
        rank=world.rank,
        world_size=world.size,
        device_id=world.device if world.device.type == "cuda" else None,
    )
    yield
    # Rank 0 hosts the store that the others still talk to: it must not leave first.
    dist.barrier()
    dist.destroy_process_group()


def _store(world: World, timeout_seconds: float) -> Store | None:
    """Where the ranks leave their addresses; None for what torchrun's variables name."""
    own = parse_rank(os.environ)
    if not own.under_torchrun:
        return HashStore()
    if not own.keeps_store or world.size == 1:
        return None
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
    return fresh_store(store, world.rank, world.size, timeout_seconds=timeout_seconds)
