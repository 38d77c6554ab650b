"""From a configuration to a training loop: everything a run is made of, in the order in which it depends on
each other.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from ddp_trainer.client.batches import BatchPlan
from ddp_trainer.client.recovery import Recovery
from ddp_trainer.client.run import Run
from ddp_trainer.client.states import LOSSES, States
from ddp_trainer.contract.environment import parse_job
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.live.membership import Membership
from ddp_trainer.logs.runlog import RunLog
from ddp_trainer.logs.writers import check_wandb
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.ranks import ShardRanks
from ddp_trainer.tasks import load_task
from ddp_trainer.train.config import SCALER, TrainConfig
from ddp_trainer.train.data import Cursor, Loader
from ddp_trainer.train.loop import TrainingLoop
from ddp_trainer.train.memory import MicroBatches, MicroBatchNote, from_first_rank, starting_micro_batch
from ddp_trainer.train.optim import OptimizerSettings, build_optimizer, build_scheduler
from ddp_trainer.train.precision import Precision
from ddp_trainer.train.profiling import Profiler
from ddp_trainer.train.randomness import make_deterministic, seed_everything
from ddp_trainer.train.strategies import strategy_class

if TYPE_CHECKING:
    from ddp_trainer.live.pod_group import PodGroup


def build(
    config: TrainConfig,
    world: World,
    heartbeat: Heartbeat,
    membership: Membership | None = None,
    pod: PodGroup | None = None,
) -> TrainingLoop:
    """The loop of one run. Raises UserError for a task, strategy or setting that cannot work.

    With `membership`, the ranks recover live. They join each other when the loop begins: here each is alone, but for
    those that hold the model together as a `pod`.
    """
    if config.deterministic:
        make_deterministic(world.device)
    job = parse_job(os.environ, default_name=config.task)
    note = MicroBatchNote(job.log_dir / "micro_batch.json", job.uid)
    limit = from_first_rank(world, note.read())
    live_ranks = job.live.ranks if membership is not None and job.live is not None else None
    # with live recovery each rank knows a limit of its own until it meets the others
    known = limit if live_ranks is None else None
    micro_batch = starting_micro_batch(config, world, known, live_ranks=live_ranks)
    config = dataclasses.replace(config, micro_batch=micro_batch)
    task = load_task(config.task, config.task_options)
    dataset = task.train_dataset()
    plan = BatchPlan(
        samples=_length(dataset, config),
        global_batch=config.global_batch,
        seed=config.seed,
        keep_last=config.last_batch == "keep",
        shuffle=config.shuffle,
    )
    total_steps = min(config.max_steps or plan.steps_per_epoch * config.epochs, plan.steps_per_epoch * config.epochs)
    if (window := config.profile_window) is not None and window.last > total_steps:
        raise UserError(
            f"--profile {config.profile} ends after the last of the {total_steps} steps of this run, and a profile is "
            "written when its last step is done: choose earlier steps"
        )

    # The same initial weights on every rank, then another stream of dropout on each.
    seed_everything(config.seed)
    model = task.model()
    seed_everything(config.seed, world.rank + 1)

    scaler = {field.removeprefix("scaler_"): getattr(config, field) for field in SCALER}
    precision = Precision(config.precision, world.device, scaler)
    strategy = strategy_class(config.strategy)(config, world, task, precision)
    if membership is not None:
        strategy.recover(membership, pod)
    strategy.wrap(model)
    optimizer = build_optimizer(config, strategy.parameters(), world.device)
    scheduler = build_scheduler(config, optimizer, total_steps)
    cursor = Cursor(plan)
    log = RunLog(job, world, wandb=_wandb(config))
    saved, sharded = strategy.stateful(optimizer)
    states = States(
        live={"optimizer": optimizer, **precision.live},  # the order of the calls is the loop's own
        saved={
            "settings": OptimizerSettings(config),
            **saved,
            "scheduler": scheduler,
            "precision": precision,
            "data": cursor,
        },
        sharded=sharded,
        per_rank=(),
        changes_with_optimizer=("settings", "precision", "data"),
    )
    attached = Run(
        states,
        world,
        job,
        heartbeat,
        log=log,
        global_batch=config.global_batch,
        total_steps=total_steps,
        strategy=config.strategy,
        plot_every=config.log_every,
        plotted=lambda: precision.plotted,
        prints_steps=True,
        has_epochs=True,
        config=dataclasses.asdict(config),
        has_newcomer=(lambda: membership.has_newcomer) if membership is not None else (lambda: False),
        least=membership.least if membership is not None else None,
        procs=membership.procs if membership is not None else 1,
        modules=lambda: (strategy.module,),
        check_view=membership.check_leads if membership is not None else None,
        shard_ranks=ShardRanks(pod.rank, pod.size, pod.new_group, pod.together) if pod is not None else None,
    )
    micro_batches = MicroBatches(world, strategy.data_world.size, note, limit=limit)
    loader = Loader(
        dataset,
        plan,
        strategy.data_world,
        micro_batch=config.micro_batch,
        collate=task.collate,
        workers=config.workers,
        prefetch=config.prefetch,
    )
    together = pod.together if pod is not None else nullcontext
    recovery = None
    if membership is not None and job.live is not None:
        wait = membership.waited

        def regroup() -> None:
            strategy.regroup()
            micro_batches.regroup(world.size)
            micro_batches.agree(wait)
            loader.take_at_most(micro_batches.limit)

        recovery = Recovery(
            membership=membership,
            place=job.live,
            world=world,
            attached=attached,
            position=cursor,
            modules=lambda: (strategy.model,),
            regroup=regroup,
            log=log,
            heartbeat=heartbeat,
            states={
                **{name: state for name, state in states.saved.items() if name not in sharded},
                LOSSES: log.losses,
            },
            shards=strategy.shards(optimizer),
            together=together,
        )
    # after the seeds, in case a task draws the samples that it holds out
    eval_dataset = task.eval_dataset()
    if eval_dataset is not None and config.validation_interval.count:
        _length(eval_dataset, config, "eval_dataset")
    return TrainingLoop(
        config=config,
        world=world,
        strategy=strategy,
        optimizer=optimizer,
        scheduler=scheduler,
        precision=precision,
        cursor=cursor,
        loader=loader,
        eval_dataset=eval_dataset,
        total_steps=total_steps,
        attached=attached,
        heartbeat=heartbeat,
        log=log,
        micro_batches=micro_batches,
        profiler=Profiler(config.profile_window, job.log_dir / "profile", world),
        recovery=recovery,
        together=together,
    )


def _wandb(config: TrainConfig) -> dict[str, Any] | None:
    """What a W&B run is to note, if there is to be one."""
    if config.wandb == "off":
        return None
    check_wandb()
    return dataclasses.asdict(config)


def _length(dataset: Dataset[Any], config: TrainConfig, name: str = "train_dataset") -> int:
    held_out = name == "eval_dataset"
    try:
        samples = len(dataset)  # type: ignore[arg-type]
    except TypeError as error:
        why = "the ranks cannot share it" if held_out else "a position in it means nothing"
        raise UserError(
            f"task {config.task!r}: its {name} has no len(), so {why}; give it __len__ and __getitem__"
        ) from error
    if not samples:
        fix = ": hold samples out, or return None for no validation" if held_out else ""
        raise UserError(f"task {config.task!r}: its {name} is empty{fix}")
    return samples
