"""The built-in loop with ranks that recover live (`client.recovery`)."""

from __future__ import annotations

import sys
from typing import Final

from ddp_trainer.client.recovery import membership_of
from ddp_trainer.contract.environment import JobEnvironment, LivePlace
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.live.deciding import Finished
from ddp_trainer.rank.world import World
from ddp_trainer.train.build import build
from ddp_trainer.train.config import TrainConfig

REPLICATED: Final = ("ddp", "manual_allreduce", "manual_rs_ag")
"""Those in which each rank holds the whole state."""


def train_live(config: TrainConfig, world: World, heartbeat: Heartbeat, job: JobEnvironment, place: LivePlace) -> None:
    """Train with ranks that recover live. Each is alone until the loop begins."""
    check_live(config, world)
    membership = membership_of(job, place, timeout_seconds=config.timeout_seconds)
    world.move(place.rank, 1)
    try:
        build(config, world, heartbeat, membership).run()
    except Finished as end:
        print(f"ddp_trainer.train: {end}", file=sys.stderr)
        heartbeat.enter("done")
        return
    membership.close()


def check_live(config: TrainConfig, world: World) -> None:
    """Refuse what live recovery cannot keep equal yet. Raises UserError."""
    problems = {
        f"--strategy {config.strategy}": config.strategy not in REPLICATED,
        "--workers": config.workers > 0,
        "--static-graph": config.static_graph,
        "CUDA": world.device.type == "cuda",
    }
    for what, is_problem in problems.items():
        if is_problem:
            raise UserError(f"restart.scope Live does not work with {what} yet: use InPlace")
