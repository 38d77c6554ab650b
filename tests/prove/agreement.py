"""Agreement: every strategy gives the same loss at every step as the plain loop on one rank.

TinyTransformerLM in fp32, from one seed and always with the same global batch. The loss of every step is compared
with that of `single`. The last batch of an epoch has 9 samples, which two ranks cannot share evenly, and each rank
cuts its share into micro-batches, so averaging averages or dropping the remainder would show.

Two optimizers, because neither shows every error. AdamW normalises the gradient: it magnifies rounding errors, but
does not notice a gradient that is twice too large. SGD with momentum and without clipping does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.prove.tables import Table, small, verdict
from tests.prove.training import losses, trained_in_one_start
from tests.trainer.train.volume import Volume

STEPS: Final = 50
SHOWN: Final = (1, 10, 20, 30, 40, 50)

TASK: Final = (
    *("--task", "tiny_lm", "--task-options", "tokens=random", "--task-options", "samples=249"),
    *("--global-batch", "16", "--validate-every", "never"),
)
"""16 steps an epoch: 15 of 16 samples and one of 9."""
OPTIMIZERS: Final = {
    "AdamW": ("--lr", "3e-4", "--weight-decay", "0.01", "--clip-norm", "1"),
    "SGD": ("--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.05"),
}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to share a step, and how far its losses may be from those of `single`."""

    ranks: int
    limit: float
    arguments: tuple[str, ...]


REFERENCE: Final = "single"
WAYS: Final = {
    REFERENCE: Way(1, 0.0, ("--strategy", "single")),
    "ddp": Way(2, 1e-5, ("--strategy", "ddp")),
    "ddp, accumulating": Way(2, 1e-5, ("--strategy", "ddp", "--micro-batch", "3")),
    "manual_allreduce": Way(2, 1e-5, ("--strategy", "manual_allreduce", "--micro-batch", "4")),
    "manual_rs_ag": Way(2, 1e-5, ("--strategy", "manual_rs_ag", "--micro-batch", "4")),
    "fsdp": Way(2, 1e-4, ("--strategy", "fsdp", "--micro-batch", "4")),
    "pipeline, GPipe": Way(2, 1e-4, ("--strategy", "pipeline", "--pipeline-schedule", "gpipe")),
    "pipeline, 1F1B": Way(2, 1e-4, ("--strategy", "pipeline", "--pipeline-schedule", "1f1b")),
}


@dataclass(frozen=True, slots=True)
class Run:
    """The loss of each step, of step 1 first."""

    optimizer: str
    way: str
    losses: tuple[float, ...]


def arguments(optimizer: str, way: str, steps: int = STEPS) -> tuple[str, ...]:
    """What the trainer is started with."""
    return (*TASK, *OPTIMIZERS[optimizer], *WAYS[way].arguments, "--max-steps", str(steps))


def measure(folder: Path) -> Iterator[Run]:
    """Train all of them; the runs of one number of ranks share one start of torchrun."""
    for ranks in sorted({way.ranks for way in WAYS.values()}):
        which = {
            f"{optimizer.lower()}-{number}": (optimizer, way)
            for optimizer in OPTIMIZERS
            for number, way in enumerate(WAYS)
            if WAYS[way].ranks == ranks
        }
        root = folder / f"ranks-{ranks}"
        trained_in_one_start(Volume(root), ranks, {job: arguments(*names) for job, names in which.items()})
        for job, (optimizer, way) in which.items():
            yield Run(optimizer, way, losses(Volume(root, job)))


@dataclass(frozen=True, slots=True)
class Compared:
    """A run beside its reference."""

    run: Run
    reference: Run

    @property
    def way(self) -> Way:
        return WAYS[self.run.way]

    @property
    def worst(self) -> tuple[float, int]:
        """The largest difference between two losses of one step, and that step."""
        pairs = zip(self.run.losses, self.reference.losses, strict=True)
        return max((abs(one - other), step) for step, (one, other) in enumerate(pairs, start=1))

    @property
    def problem(self) -> str | None:
        difference, step = self.worst
        # not `>`, which a NaN would pass
        if difference <= self.way.limit:
            return None
        return (
            f"{self.run.way} with {self.run.optimizer}: the loss of step {step} is {difference:.1e} from that of "
            f"{REFERENCE}, more than {self.way.limit:.0e}"
        )


def compared(runs: Sequence[Run]) -> list[Compared]:
    """Each run beside `single` with the same optimizer."""
    references = {run.optimizer: run for run in runs if run.way == REFERENCE}
    return [Compared(run, references[run.optimizer]) for run in runs]


def violations(runs: Sequence[Run]) -> list[str]:
    """What is not as it must be, a run that is missing included."""
    found = {(run.optimizer, run.way) for run in runs if len(run.losses) == STEPS}
    missing = [f"{n} with {o}: no run of {STEPS} steps" for o in OPTIMIZERS for n in WAYS if (o, n) not in found]
    return missing or [row.problem for row in compared(runs) if row.problem is not None]


def tables(runs: Sequence[Run]) -> list[Table]:
    ordered = sorted(compared(runs), key=lambda row: (row.run.optimizer, list(WAYS).index(row.run.way)))
    rows = tuple(
        (
            row.run.optimizer,
            row.run.way,
            str(row.way.ranks),
            *(f"{row.run.losses[step - 1]:.6f}" for step in SHOWN),
            *(("–", "–") if row.run is row.reference else (small(row.worst[0]), f"{row.way.limit:.0e}")),
            "reference" if row.run is row.reference else verdict(row.problem),
        )
        for row in ordered
    )
    columns = (
        *("optimizer", "strategy", "ranks"),
        *(f"loss of step {step}" if step == 1 else f"{step}" for step in SHOWN),
        *(f"max abs Δ, {STEPS} steps", "limit", ""),
    )
    return [Table("TinyTransformerLM, fp32, global batch 16: losses compared with single", columns, rows)]
