"""Elastic: a run that continues with another number of ranks gives the same losses.

2 ranks are killed in the middle of an epoch; 1 rank resumes and is killed in the middle of a later one; 2 ranks resume
and finish. The global batch does not change, so the share of each rank and its micro-batches do. Every rank records the
samples and the learning rate of each of its steps, which shows that each epoch used each sample exactly once. The order
of summation depends on the number of ranks, so losses have a tolerance; learning rates must be bitwise equal.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.prove.tables import Table, small, verdict
from tests.prove.training import WATCHED, Untrained, killed, losses, started, trained
from tests.trainer.train.volume import Volume

SAMPLES: Final = 77
GLOBAL_BATCH: Final = 10
EPOCH: Final = 8
"""Steps of an epoch; the last of them has 7 samples, which two ranks share unevenly."""
EPOCHS: Final = 5
WORLDS: Final = ((2, 18), (1, 32), (2, None))
"""Ranks of each attempt, and the step in which it is killed."""
LIMIT: Final = 1e-4
STRATEGIES: Final = ("ddp", "manual_rs_ag", "fsdp")
REFUSED: Final = 3
"""A number of ranks that does not divide the global batch."""

TASK: Final = (
    *("--task", "proof_tasks:Numbered", "--task-options", f"samples={SAMPLES}", "--validate-every", "never"),
    *("--global-batch", str(GLOBAL_BATCH), "--micro-batch", "4", "--epochs", str(EPOCHS)),
    *("--lr", "0.002", "--scheduler", "cosine", "--warmup-steps", "5", "--clip-norm", "1"),
)
EVERY: Final = "5steps"


@dataclass(frozen=True, slots=True)
class Run:
    """A run from its start to its end, from step 1 on: the loss, the learning rate and the samples that counted."""

    losses: tuple[float, ...]
    rates: tuple[float, ...]
    samples: tuple[tuple[int, ...], ...]

    @property
    def wrong_epochs(self) -> list[str]:
        """Epochs that did not take every sample exactly once, and how."""
        wrong = []
        for epoch in range(-(-len(self.samples) // EPOCH)):
            steps = self.samples[epoch * EPOCH : (epoch + 1) * EPOCH]
            seen = Counter(sample for step in steps for sample in step)
            missing = sorted(set(range(SAMPLES)) - seen.keys())
            repeated = sorted(sample for sample, times in seen.items() if times > 1)
            if missing or repeated or seen.total() != SAMPLES:
                wrong.append(f"epoch {epoch} lacks the samples {missing} and has {repeated} more than once")
        return wrong


@dataclass(frozen=True, slots=True)
class Resized:
    """A run that changed its number of ranks, and the one that did not."""

    strategy: str
    resumed_after: tuple[int, ...]
    run: Run
    unbroken: Run

    @property
    def worst(self) -> tuple[float, int]:
        """The largest difference between two losses of one step, and that step."""
        pairs = zip(self.run.losses, self.unbroken.losses, strict=True)
        return max((abs(one - other), step) for step, (one, other) in enumerate(pairs, start=1))

    @property
    def changed_rates(self) -> int:
        """Steps with another learning rate than in the unbroken run."""
        return sum(one != other for one, other in zip(self.run.rates, self.unbroken.rates, strict=True))

    @property
    def problem(self) -> str | None:
        difference, step = self.worst
        found = [*self.run.wrong_epochs, *(f"unbroken: {text}" for text in self.unbroken.wrong_epochs)]
        if not difference <= LIMIT:
            found.append(f"the loss of step {step} is {difference:.1e} from the unbroken run's, more than {LIMIT:.0e}")
        if self.changed_rates:
            found.append(f"{self.changed_rates} steps had another learning rate than in the unbroken run")
        if len(self.resumed_after) != len(WORLDS) - 1 or not all(step % EPOCH > 0 for step in self.resumed_after):
            found.append(f"it resumed after the steps {self.resumed_after}, not inside of {len(WORLDS) - 1} epochs")
        return f"{self.strategy}: {'; '.join(found)}" if found else None


@dataclass(frozen=True, slots=True)
class Refusal:
    """What became of a start with a number of ranks that does not divide the global batch."""

    ranks: int
    message: str
    wrote: tuple[str, ...]

    @property
    def problem(self) -> str | None:
        if f"cannot be divided among {self.ranks} ranks" not in self.message:
            return f"{self.ranks} ranks were not refused by name, but: {self.message!r}"
        if self.wrote:
            return f"{self.ranks} ranks were refused, but only after writing {', '.join(self.wrote)}"
        return None


Row = Resized | Refusal


def measure(folder: Path) -> Iterator[Row]:
    """Train each strategy through all its worlds and without a change, then start with too many ranks."""
    for strategy in STRATEGIES:
        yield resized(folder / strategy, strategy)
    yield refusal(folder / "refused")


def resized(folder: Path, strategy: str) -> Resized:
    """Train through all worlds, and once without a change."""
    arguments = (*TASK, "--strategy", strategy)
    changing, unbroken = Volume(folder / "changing"), Volume(folder / "unbroken")
    for attempt, (ranks, end) in enumerate(WORLDS):
        _live(changing, ranks, end, attempt, arguments)
    _live(unbroken, WORLDS[0][0], None, 0, arguments)
    resumed = tuple(event["step"] for event in changing.events("resumed"))
    return Resized(strategy, resumed, _run(changing), _run(unbroken))


def refusal(folder: Path) -> Refusal:
    volume = Volume(folder)
    done = started(volume, REFUSED, *TASK)
    said = [line for line in done.stderr.splitlines() if line.startswith("ddp_trainer.train: ")]
    written = sorted(str(path.relative_to(folder)) for path in (folder / "shared").rglob("*"))
    return Refusal(REFUSED, said[0] if said and done.returncode else done.stderr[-1000:], tuple(written))


def _live(volume: Volume, ranks: int, end: int | None, attempt: int, arguments: tuple[str, ...]) -> None:
    environment = {"DDPJOB_SNAPSHOT_EVERY": EVERY, "DDPJOB_ATTEMPT": str(attempt)}
    if end is not None:
        kill = {"point": "before update", "step": end, "part": 0, "rank": ranks - 1}
        killed(volume, ranks, kill, *arguments, samples=True, **environment)
        return
    notes = volume.root / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    watch = json.dumps({"notes": str(notes), "samples": True})
    trained(volume, ranks, WATCHED, *arguments, WATCH=watch, **environment)


def _run(volume: Volume) -> Run:
    """Of steps that were trained more than once, the last time counts: it is what the next ones built on."""
    steps: dict[int, dict[str, Any]] = {}
    for path in sorted((volume.root / "notes").glob("attempt-*.jsonl")):
        for line in path.read_text().splitlines():
            note = {"attempt": path.name.split("-")[1], **json.loads(line)}
            before = steps.get(note["step"])
            if before is None or before["attempt"] != note["attempt"]:
                steps[note["step"]] = note
            elif before["lr"] == note["lr"]:
                before["samples"] += note["samples"]
            else:
                raise Untrained(
                    f"ranks trained step {note['step']} with learning rates {before['lr']} and {note['lr']}"
                )
    ordered = [steps[step] for step in sorted(steps)]
    rates = tuple(note["lr"] for note in ordered)
    return Run(losses(volume), rates, tuple(tuple(note["samples"]) for note in ordered))


def violations(rows: Sequence[Row]) -> list[str]:
    """What is not as it must be, a strategy that is missing included."""
    steps = EPOCH * EPOCHS
    found = {row.strategy for row in rows if isinstance(row, Resized) and len(row.run.losses) == steps}
    missing = [f"{strategy}: no run of {steps} steps" for strategy in STRATEGIES if strategy not in found]
    if not any(isinstance(row, Refusal) for row in rows):
        missing.append(f"a start with {REFUSED} ranks: not tried")
    return missing or [row.problem for row in rows if row.problem is not None]


def tables(rows: Sequence[Row]) -> list[Table]:
    changed = Table(
        f"Changing ranks, constant global batch of {GLOBAL_BATCH}: {EPOCHS} epochs compared with the uninterrupted run",
        (
            *("strategy", "ranks", "resumed after steps", f"epochs with each of {SAMPLES} samples once"),
            *("max abs Δ loss", "limit", "learning rates changed", ""),
        ),
        tuple(_cells(row) for row in rows if isinstance(row, Resized)),
    )
    refused = Table(
        "A number of ranks that does not divide the global batch is refused before anything is written",
        ("ranks", "message", ""),
        tuple((str(row.ranks), row.message, verdict(row.problem)) for row in rows if isinstance(row, Refusal)),
    )
    return [changed, refused]


def _cells(row: Resized) -> tuple[str, ...]:
    epochs = len(row.run.samples) // EPOCH
    return (
        row.strategy,
        " → ".join(str(ranks) for ranks, _ in WORLDS),
        ", ".join(map(str, row.resumed_after)),
        f"{epochs - len(row.run.wrong_epochs)} of {epochs}",
        small(row.worst[0]),
        f"{LIMIT:.0e}",
        f"{row.changed_rates} of {len(row.run.rates)}",
        verdict(row.problem),
    )
