"""The published run: the trainer reproduces the losses of a published notebook, digit for digit.

"Implementing Data Parallel Training in PyTorch" trains TinyTransformerLM with the defaults of its TrainCfg on 4
GPUs and prints six losses. Here 4 ranks on gloo train the same 50 steps twice: from the notebook's initial weights
and in its order of samples, where the losses must be equal; and with the trainer's own initialisation and order,
where only the curve must agree.

The tokens are random, so there is nothing to learn, and the loss has a lower bound. In the first epoch the model has
not seen the tokens that it predicts, so the expected loss of any predictor is ln 512 plus the divergence of its
prediction from the uniform distribution. A loss is the mean of N = 128 · 63 terms, which are independent of each
other given the weights. Near the uniform distribution the standard deviation of a term is √(2 · excess), where the
excess is the mean loss minus ln 512. No loss may be more than four standard deviations of that mean below ln 512: a
lower one would mean that the model has seen its targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.prove.tables import Table, small, verdict
from tests.prove.training import losses, trained
from tests.trainer.train.volume import Volume

STEPS: Final = 50
RANKS: Final = 4
PUBLISHED: Final = {0: 6.4049, 10: 6.2795, 20: 6.2496, 30: 6.2507, 40: 6.2449, 49: 6.2457}
"""Loss by step, counted from 0 as the notebook does."""
FLOOR: Final = math.log(512)
TOKENS: Final = 128 * 63
"""Predictions in the loss of one step."""
SIGMAS: Final = 4.0
SETTLED: Final = 25
"""The step from which on the curve is flat, and its mean tells the excess."""

DEFAULTS: Final = (
    *("--seed", "42", "--global-batch", "128", "--lr", "3e-4", "--weight-decay", "0.01"),
    *("--validate-every", "never"),
)
"""Those of TrainCfg; the weight decay is that of torch.optim.AdamW where none is given."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Whose weights and order, and how far its losses may be from the published ones from step `since` on."""

    arguments: tuple[str, ...]
    limit: float
    since: int


VARIANTS: Final = {
    "the notebook's": Variant(("--task", "proof_tasks:Published"), 2e-4, 0),
    "the trainer's": Variant(("--task", "tiny_lm", "--task-options", "tokens=random"), 0.1, 10),
}


@dataclass(frozen=True, slots=True)
class Run:
    """The loss of each step, of step 0 first."""

    variant: str
    losses: tuple[float, ...]

    @property
    def noise(self) -> float:
        """How far below the floor a loss may be by chance."""
        settled = self.losses[SETTLED:]
        excess = max(0.0, sum(settled) / len(settled) - FLOOR)
        return SIGMAS * math.sqrt(2 * excess / TOKENS)

    @property
    def worst(self) -> tuple[float, int]:
        """The largest distance from a published loss that there is a limit for, and its step."""
        since = VARIANTS[self.variant].since
        return max((abs(self.losses[step] - loss), step) for step, loss in PUBLISHED.items() if step >= since)

    @property
    def problems(self) -> list[str]:
        distance, step = self.worst
        limit, lowest = VARIANTS[self.variant].limit, min(self.losses)
        found = []
        # not `>`, which a NaN would pass
        if not distance <= limit:
            found.append(f"the loss of step {step} is {distance:.4f} from the published one, more than {limit}")
        if not lowest >= FLOOR - self.noise:
            found.append(
                f"a loss of {lowest:.4f} is below ln 512 = {FLOOR:.4f} by more than the noise, {self.noise:.4f}"
            )
        return [f"{self.variant} weights and order: {text}" for text in found]


def arguments(variant: str, steps: int = STEPS) -> tuple[str, ...]:
    """What the trainer is started with."""
    return (*VARIANTS[variant].arguments, *DEFAULTS, "--max-steps", str(steps))


def measure(folder: Path) -> Iterator[Run]:
    """Train both, 4 ranks under torchrun each."""
    for number, variant in enumerate(VARIANTS):
        yield Run(variant, losses(trained(Volume(folder / f"variant-{number}"), RANKS, *arguments(variant))))


def violations(runs: Sequence[Run]) -> list[str]:
    """What is not as it must be, a run that is missing included."""
    found = {run.variant for run in runs if len(run.losses) == STEPS}
    missing = [f"{variant} weights and order: no run of {STEPS} steps" for variant in VARIANTS if variant not in found]
    return missing or [problem for run in runs for problem in run.problems]


def tables(runs: Sequence[Run]) -> list[Table]:
    beside = Table(
        f"TrainCfg defaults, {RANKS} ranks, {STEPS} steps on random tokens, compared with the published losses",
        ("weights and order", *(f"step {step}" for step in PUBLISHED), "max abs Δ", "limit", ""),
        (
            ("published", *(f"{loss:.4f}" for loss in PUBLISHED.values()), "–", "–", "reference"),
            *(
                (
                    run.variant,
                    *(f"{run.losses[step]:.4f}" for step in PUBLISHED),
                    small(run.worst[0]),
                    _limit(VARIANTS[run.variant]),
                    verdict(run.problems[0] if run.problems else None),
                )
                for run in runs
            ),
        ),
    )
    floor = Table(
        f"No loss below the lower bound, ln 512 = {FLOOR:.4f}",
        ("weights and order", "lowest of 50 losses", "minus the bound", f"noise, {SIGMAS:.0f} σ", ""),
        tuple(
            (
                run.variant,
                f"{min(run.losses):.4f}",
                f"{min(run.losses) - FLOOR:+.4f}",
                f"{run.noise:.4f}",
                verdict(run.problems[0] if run.problems else None),
            )
            for run in runs
        ),
    )
    return [beside, floor]


def _limit(variant: Variant) -> str:
    return f"{variant.limit}" + (f" from step {variant.since} on" if variant.since else "")
