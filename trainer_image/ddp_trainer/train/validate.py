"""Validation: loss and accuracy over the whole held-out set, the same whatever the number of ranks.

Every sample is looked at by exactly one rank. Sums and counts are added up in float64 and divided once at the
end: a mean of ranks' means would weigh the samples of a smaller share more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from ddp_trainer.rank.world import World
from ddp_trainer.tasks import Task
from ddp_trainer.train.data import every_nth, fetch, to_device
from ddp_trainer.train.strategies.base import Strategy


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of `samples` held-out samples: their mean loss, and how many of `judged` predictions were `right`."""

    samples: int
    loss: float
    right: int
    judged: int

    @property
    def accuracy(self) -> float | None:
        """The share of right predictions; None where the task judges none."""
        return self.right / self.judged if self.judged else None

    @property
    def metrics(self) -> dict[str, float]:
        """As heartbeats and logs name them."""
        found = {"eval_loss": self.loss}
        return found if self.accuracy is None else {**found, "eval_accuracy": self.accuracy}

    def __str__(self) -> str:
        text = f"held-out loss {self.loss:.4f} over {self.samples} samples"
        if self.accuracy is None:
            return text
        return f"held-out accuracy {self.accuracy:.4f} ({self.right} of {self.judged}), {text}"


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    dataset: Dataset[Any],
    world: World,
    *,
    batch: int,
    on_batch: Callable[[], None],
    together: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Evaluation:
    """Validate the model on all of `dataset`; `on_batch` is called after each batch, as a sign of life, `together` is
    around the collective of all ranks.

    Draws no random number and leaves the model in training mode, so that training goes on as if it had not
    been.
    """
    task, model = strategy.task, strategy.model
    strategy.share_statistics()
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)
    model.eval()
    try:
        share = strategy.data_world
        for indices in every_nth(len(dataset), share.rank, share.size, batch):  # type: ignore[arg-type]
            if len(indices) or strategy.forward_is_collective:
                # without a share of its own, a rank that the others need looks at a sample that does not
                # count
                chosen = indices if len(indices) else torch.zeros(1, dtype=torch.int64, device="cpu")
                data = to_device(_batch(dataset, chosen, task), world.device)
                output = strategy.predict(data)
                if len(indices) and output is not None:
                    totals += _sums(strategy, output, data, len(indices))
            on_batch()
    finally:
        model.train()
    if world.size > 1:
        with together():
            dist.all_reduce(totals)
    samples, loss, right, judged = totals.tolist()
    return Evaluation(int(samples), loss / samples, int(right), int(judged))


def _sums(strategy: Strategy, output: Any, data: Any, samples: int) -> Tensor:
    """Samples, sum of their losses, right and judged predictions, as float64."""
    with strategy.autocast():
        # from outputs in 16 bits it makes a loss in fp32, as in training: one in bf16 has three digits
        loss = strategy.task.loss(output, data).double()
    right, judged = strategy.task.score(output, data) or (loss.new_zeros(()), 0)
    return torch.stack([loss.new_tensor(samples), loss * samples, right.double(), loss.new_tensor(judged)])


def _batch(dataset: Dataset[Any], indices: Tensor, task: Task) -> Any:
    return fetch(dataset, indices, task.collate) if task.collate else fetch(dataset, indices)
