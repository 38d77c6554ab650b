"""The plain loop on one rank: the reference that every other strategy is compared with."""

from __future__ import annotations

from ddp_trainer.strategies.base import Strategy


class Single(Strategy):
    """Nothing is shared, so nothing is overridden."""

    name = "single"
