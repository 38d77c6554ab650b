"""Bitwise resume: a run that was killed at any moment and resumed is bit for bit equal to one that was not.

20 moments, drawn with a seed. For each strategy: one in the middle of an epoch, next to the optimizer step; one
between two micro-batches; one during a validation; and one during a save, in the middle of a file operation. At
that point a rank sends SIGKILL to all ranks. The next attempt resumes from what is on the volume and trains to the
end. Every file of its last snapshot (weights, optimizer, scheduler, data cursor, RNG state of all ranks) and the loss
of every step must be equal to those of the uninterrupted run.

A snapshot is due every 5 steps and is written in the background, so the newest may not be complete when the ranks are
killed. All kinds of state are used: dropout, shuffling, AdamW, warm-up and cosine decay, clipping, accumulation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.prove.tables import Table, verdict
from tests.prove.training import killed, losses, trained, trained_in_one_start
from tests.trainer.train.volume import Volume

STEPS: Final = 33
EPOCH: Final = 7
"""Steps of an epoch: 80 samples in batches of 12, the last of 8."""
EVERY: Final = 5
"""Steps from one snapshot to the next."""
FIRST: Final = 11
"""The first step that may be hit: two snapshots are due before it, so there is one to resume from."""
OPERATIONS: Final = 20
"""File operations of a save on rank 0, at the least."""
OPERATIONS_OF_OTHERS: Final = 6
"""Those of another rank, which writes only its own files of a sharded snapshot."""
SEED: Final = 12

TASK: Final = (
    *("--task", "tiny_lm", "--global-batch", "12", "--micro-batch", "2", "--max-steps", str(STEPS)),
    *("--lr", "0.002", "--scheduler", "cosine", "--warmup-steps", "5", "--clip-norm", "1", "--weight-decay", "0.1"),
    *(
        part
        for option in ("tokens=random", "samples=80", "dropout=0.1", "d_model=64", "n_layers=2", "d_ff=128")
        for part in ("--task-options", option)
    ),
)
STRATEGIES: Final = {"single": 0, "ddp": 2, "manual_allreduce": 2, "manual_rs_ag": 2, "fsdp": 2}
"""Ranks; 0 is the trainer without torchrun."""
PHASES: Final = ("mid-epoch", "mid-accumulation", "validation", "save")


@dataclass(frozen=True, slots=True)
class PodState:
    """Where all ranks are killed; `point` to `rank` are arguments of `watched.py`."""

    strategy: str
    phase: str
    point: str
    step: int
    part: int
    rank: int

    @property
    def kill(self) -> dict[str, str | int]:
        return {name: value for name, value in asdict(self).items() if name not in ("strategy", "phase")}


def moments() -> list[PodState]:
    """One of each phase for each strategy: the same ones in every run of the proof."""
    draw = random.Random(SEED)
    return [_moment(strategy, phase, draw) for strategy in STRATEGIES for phase in PHASES]


def _moment(strategy: str, phase: str, draw: random.Random) -> PodState:
    rank = draw.randrange(max(1, STRATEGIES[strategy]))
    inside = [step for step in range(FIRST, STEPS) if 0 < (step - 1) % EPOCH < EPOCH - 1]
    if phase == "mid-epoch":
        return PodState(strategy, phase, draw.choice(["before update", "after update"]), draw.choice(inside), 0, rank)
    if phase == "mid-accumulation":
        # a share of 6 or more in micro-batches of 2: not before the first of them
        return PodState(strategy, phase, "micro-batch", draw.choice(inside), draw.choice([1, 2]), rank)
    if phase == "validation":
        return PodState(
            strategy, phase, "validation", draw.choice(range(2 * EPOCH, STEPS, EPOCH)), draw.choice([0, 1]), rank
        )
    # of an ordinary snapshot rank 0 writes all, of a sharded one each rank its own files
    rank = rank if strategy == "fsdp" else 0
    step = draw.choice(range(3 * EVERY, STEPS, EVERY))
    return PodState(
        strategy, phase, "save", step, draw.randrange(OPERATIONS if rank == 0 else OPERATIONS_OF_OTHERS), rank
    )


@dataclass(frozen=True, slots=True)
class Resume:
    """What became of a run that was killed at `moment`: where that was in words, and what of its end was compared."""

    moment: PodState
    where: str
    resumed_from: int
    losses: int
    files: int
    bytes: int
    different: tuple[str, ...]

    @property
    def problem(self) -> str | None:
        at = f"{self.moment.strategy}, killed in step {self.moment.step} ({self.where})"
        if self.different:
            return f"{at}: not the same as in the unbroken run: {', '.join(self.different)}"
        if not 0 < self.resumed_from <= STEPS or not self.files or self.losses != STEPS:
            return f"{at}: resumed from step {self.resumed_from}, compared {self.files} files and {self.losses} losses"
        return None


def measure(folder: Path, chosen: Sequence[PodState] | None = None) -> Iterator[Resume]:
    """Train the unbroken runs, then kill and resume one at each moment."""
    chosen = moments() if chosen is None else chosen
    unbroken = folder / "unbroken"
    for ranks in sorted({STRATEGIES[moment.strategy] for moment in chosen}):
        names = sorted({moment.strategy for moment in chosen if STRATEGIES[moment.strategy] == ranks})
        jobs = {_job(name): (*TASK, "--strategy", name) for name in names}
        trained_in_one_start(Volume(unbroken), ranks, jobs)
    for number, moment in enumerate(chosen):
        broken = Volume(folder / f"moment-{number}", _job(moment.strategy))
        yield _resumed(broken, Volume(unbroken, broken.job), moment)


def _resumed(broken: Volume, unbroken: Volume, moment: PodState) -> Resume:
    ranks, arguments = STRATEGIES[moment.strategy], (*TASK, "--strategy", moment.strategy)
    every = f"{EVERY}steps"
    place = killed(broken, ranks, moment.kill, *arguments, DDPJOB_SNAPSHOT_EVERY=every)
    trained(broken, ranks, *arguments, DDPJOB_SNAPSHOT_EVERY=every, DDPJOB_ATTEMPT="1")
    resumed = broken.events("resumed")
    mine, theirs = broken.newest_manifest()["files"], unbroken.newest_manifest()["files"]
    different = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    pairs = zip(losses(broken), losses(unbroken), strict=False)
    different += [f"loss of step {step}" for step, (one, other) in enumerate(pairs, start=1) if one != other]
    return Resume(
        moment=moment,
        where=place["where"],
        resumed_from=resumed[0]["step"] if resumed else 0,
        losses=len(losses(broken)),
        files=len(mine),
        bytes=sum(entry["bytes"] for entry in mine.values()),
        different=tuple(different),
    )


def _job(strategy: str) -> str:
    return strategy.replace("_", "-")


def violations(resumes: Sequence[Resume]) -> list[str]:
    """What is not as it must be, a moment that is missing included."""
    found = {resume.moment for resume in resumes}
    missing = [f"{moment.strategy}, killed in {moment.phase}: not tried" for moment in moments() if moment not in found]
    return missing or [resume.problem for resume in resumes if resume.problem is not None]


def tables(resumes: Sequence[Resume]) -> list[Table]:
    rows = tuple(
        (
            resume.moment.strategy,
            resume.moment.phase,
            f"{resume.moment.step}",
            f"{resume.moment.rank}: {resume.where}",
            f"{resume.resumed_from}",
            f"{resume.losses} losses, {resume.files} files, {resume.bytes:,} bytes",
            verdict(resume.problem),
        )
        for resume in resumes
    )
    columns = ("strategy", "phase", "step", "killed from rank, and where it stood", "resumed after", "compared", "")
    return [
        Table(
            f"All ranks killed with SIGKILL at {len(rows)} moments of {STEPS} steps, then resumed: bitwise equal",
            columns,
            rows,
        )
    ]
