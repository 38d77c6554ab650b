"""What live recovery has cost a run: seconds from the last step of a group to the first of the next, and steps that
were begun and put back.

It is part of what all ranks have alike: a rank that joins takes it over with the state. So whichever process has node
rank 0, and exports the figures of the run, knows those of the processes before it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from ddp_trainer.contract.histograms import RECOVERY_BUCKETS, nothing_observed, observe

Kind = Literal["lost", "left", "joined"]
"""Why there is another group: a rank was lost, has left after a step, or has joined after one."""
EVENTS: Final[Mapping[Kind, str]] = {"lost": "recovered", "left": "recovered", "joined": "joined"}
"""Their names in events.jsonl."""


def _none() -> dict[str, Any]:
    return {kind: nothing_observed(RECOVERY_BUCKETS) for kind in get_args(Kind)}


@dataclass(frozen=True, slots=True)
class Costs:
    """Of this attempt, by all processes together."""

    seconds: Mapping[str, Any] = field(default_factory=_none)
    """A histogram for each kind."""
    dropped_steps: int = 0
    last: Mapping[str, Any] | None = None
    """Kind and seconds of the last recovery."""

    def after(self, kind: Kind, seconds: float, *, has_dropped: bool) -> Costs:
        """With one more recovery, which is over: the group has finished a step."""
        observed = copy.deepcopy(dict(self.seconds))
        observe(observed[kind], seconds, RECOVERY_BUCKETS)
        return Costs(observed, self.dropped_steps + has_dropped, {"kind": kind, "seconds": seconds})

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "droppedSteps": self.dropped_steps, "last": self.last}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Costs:
        return cls(given["seconds"], given["droppedSteps"], given["last"])


def is_step_dropped(steps: Sequence[int], has_begun: Sequence[bool]) -> bool:
    """Whether a step was begun that no rank has finished, so that it is taken again.

    `steps` are the finished steps of each rank, `has_begun` says which of them had begun the next one. What a rank that
    is behind had begun was finished by one that is ahead, and stands.
    """
    return any(begun for step, begun in zip(steps, has_begun, strict=True) if step == max(steps))
