"""Fault-tolerant training under torchrun. For a training loop of your own: `ddp_trainer.attach`.

Importing this package costs nothing; torch comes with the first use of what needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_trainer.client.attach import attach as attach
    from ddp_trainer.client.run import Run as Run
    from ddp_trainer.tasks import Task as Task

__all__ = ["Run", "Task", "attach"]


def __getattr__(name: str) -> Any:
    if name == "attach":
        from ddp_trainer.client.attach import attach

        return attach
    if name == "Run":
        from ddp_trainer.client.run import Run

        return Run
    if name == "Task":
        from ddp_trainer.tasks import Task

        return Task
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
