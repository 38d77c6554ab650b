"""The built-in loop with ranks that recover live (`client.recovery`)."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

import torch

from ddp_trainer.client.recovery import membership_of
from ddp_trainer.contract.environment import JobEnvironment, LivePlace, parse_rank
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.live.deciding import Finished
from ddp_trainer.rank.world import World
from ddp_trainer.train.build import build
from ddp_trainer.train.config import TrainConfig

if TYPE_CHECKING:
    from ddp_trainer.live.membership import Membership
    from ddp_trainer.live.pod_group import PodGroup

RECOVERS: Final = ("ddp", "manual_allreduce", "manual_rs_ag", "hsdp")
"""Those in which each rank, or each pod, holds the whole state."""
SHARDS_SINCE: Final = "2.13"
"""The release of torch with what `live.pod_group` uses of its device meshes."""


def train_live(config: TrainConfig, world: World, heartbeat: Heartbeat, job: JobEnvironment, place: LivePlace) -> None:
    """Train with ranks that recover live. Each is alone until the loop begins."""
    check_live(config, world)
    is_sharded = config.strategy == "hsdp"
    membership = membership_of(job, place, timeout_seconds=config.timeout_seconds, needs_replicas=is_sharded)
    world.move(place.rank, 1)
    pod = _pod_of(place, membership, config.timeout_seconds) if is_sharded else None
    try:
        build(config, world, heartbeat, membership, pod).run()
    except Finished as end:
        print(f"ddp_trainer.train: {end}", file=sys.stderr)
        heartbeat.enter("done")
        return
    membership.close()


def _pod_of(place: LivePlace, membership: Membership, timeout_seconds: float) -> PodGroup:
    """The ranks that torchrun's agent has started beside this one."""
    from ddp_trainer.live.pod_group import PodGroup

    run_dir = parse_rank(os.environ).run_dir
    assert run_dir is not None, "DDPJOB_RUN_DIR is not set: the launcher starts the ranks of a pod"
    meeting = run_dir / f"ranks-of-{os.getppid()}"
    return PodGroup(
        place.local_rank, place.procs_per_node, meeting, leave=membership.leave, timeout_seconds=timeout_seconds
    )


def check_live(config: TrainConfig, world: World) -> None:
    """Refuse what live recovery cannot keep equal yet. Raises UserError."""
    if config.strategy == "fsdp":
        raise UserError(
            "--strategy fsdp shards the model over all pods, so with restart.scope Live a pod that is lost takes its "
            "part of it along: use --strategy hsdp, which shards it within each pod, or restart.scope InPlace"
        )
    if config.strategy == "hsdp" and torch.__version__ < SHARDS_SINCE:  # compares versions, not text
        raise UserError(
            f"--strategy hsdp with restart.scope Live needs PyTorch {SHARDS_SINCE} or newer, and this is "
            f"{torch.__version__}: use a newer image, or restart.scope InPlace"
        )
    problems = {
        f"--strategy {config.strategy}": config.strategy not in RECOVERS,
        "--workers": config.workers > 0,
        "--static-graph": config.static_graph,
        "CUDA": world.device.type == "cuda",
    }
    for what, is_problem in problems.items():
        if is_problem:
            raise UserError(f"restart.scope Live does not work with {what} yet: use InPlace")
