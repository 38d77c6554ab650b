"""Train a task on every rank that torchrun started: parse, build, run.

    torchrun --nproc-per-node 2 -m ddp_trainer.train --task digits --epochs 20
    python -m ddp_trainer.train --config run.yaml --lr 3e-4

Run again, it goes on after the newest snapshot. Exit codes are those of docs/contracts.md section 3.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ddp_trainer.contract.environment import parse_job
from ddp_trainer.contract.exit_codes import EXIT_OK, FencedError, LiveRecoveryFailed, Preempted, RollBack, UserError
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.contract.process_end import end_after_exit_handlers, settle
from ddp_trainer.train.command_line import parse
from ddp_trainer.train.config import check_elastic, check_scope, check_world


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the command line says. Raises UserError, Preempted, or whatever went wrong."""
    config = parse(sys.argv[1:] if argv is None else argv)
    job = parse_job(os.environ, default_name=config.task)
    check_elastic(config, job.elastic_min_nodes)
    check_scope(config, is_live=job.live is not None)
    heartbeat = Heartbeat.from_env()
    heartbeat.enter("init")
    # After the flags are known to be good: torch takes seconds to import.
    import torch

    from ddp_trainer.rank.world import describe_world, process_group
    from ddp_trainer.train.build import build

    world = describe_world(device=config.device)
    check_world(config, world_size=world.size, device=world.device.type, devices=torch.cuda.device_count())
    heartbeat.enter("rendezvous")
    if job.live is not None:
        from ddp_trainer.train.live import train_live

        train_live(config, world, heartbeat, job, job.live)
        return
    with process_group(world, timeout_seconds=config.timeout_seconds):
        heartbeat.enter("load")
        build(config, world, heartbeat).run()


def exit_code(argv: Sequence[str]) -> int:
    """Train, and tell how it ended as an exit code and, where a person can act on it, as one line instead of
    a traceback.
    """
    try:
        main(argv)
    except (UserError, RollBack, LiveRecoveryFailed, FencedError, Preempted) as end:
        print(f"ddp_trainer.train: {end}", file=sys.stderr)
        return end.exit_code
    return EXIT_OK


if __name__ == "__main__":
    if "ddp_trainer.rank.worker" in sys.modules:
        # it keeps a record of the exception itself
        main()
    else:
        end_after_exit_handlers()
        sys.exit(settle(exit_code(sys.argv[1:])))
