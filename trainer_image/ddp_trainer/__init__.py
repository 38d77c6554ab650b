"""Fault-tolerant training under torchrun. For a training loop of your own: `ddp_trainer.attach`, or
`ddp_trainer.attach_live`.

Importing this package costs nothing; torch comes with the first use of what needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_trainer.client.attach import attach as attach
    from ddp_trainer.client.attach_live import attach_live as attach_live
    from ddp_trainer.client.live_run import LiveRun as LiveRun
    from ddp_trainer.client.run import Run as Run
    from ddp_trainer.tasks import Task as Task

__all__ = ["LiveRun", "Run", "Task", "attach", "attach_live"]


def __getattr__(name: str) -> Any:
    if name == "attach":
        from ddp_trainer.client.attach import attach

        return attach
    if name == "attach_live":
        from ddp_trainer.client.attach_live import attach_live

        return attach_live
    if name == "LiveRun":
        from ddp_trainer.client.live_run import LiveRun

        return LiveRun
    if name == "Run":
        from ddp_trainer.client.run import Run

        return Run
    if name == "Task":
        from ddp_trainer.tasks import Task

        return Task
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
