"""How the ranks share one optimizer step: one file a strategy, one interface (`strategies.base`), chosen by
`--strategy`.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Final

from ddp_trainer.errors import UserError

if TYPE_CHECKING:
    from ddp_trainer.strategies.base import Strategy

STRATEGIES: Final = {
    "single": "Single",
    "ddp": "DDP",
    "manual_allreduce": "ManualAllReduce",
    "manual_rs_ag": "ManualReduceScatterAllGather",
    "data_parallel": "DataParallel",
    "fsdp": "FSDP",
    "pipeline": "Pipeline",
}
"""The class of each strategy; its module has the strategy's name, and is imported only when it is chosen."""


def strategy_class(name: str) -> type[Strategy]:
    """The class behind `--strategy NAME`. Raises UserError when there is none."""
    if name not in STRATEGIES:
        close = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(STRATEGIES)}"
        raise UserError(f"--strategy {name} is unknown: {hint}")
    module = importlib.import_module(f"ddp_trainer.strategies.{name}")
    found: type[Strategy] = getattr(module, STRATEGIES[name])
    return found
