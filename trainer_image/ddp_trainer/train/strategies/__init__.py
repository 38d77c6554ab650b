"""How the ranks share one optimizer step: one interface (`strategies.base`), chosen by
`--strategy`.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Final

from ddp_trainer.contract.exit_codes import UserError

if TYPE_CHECKING:
    from ddp_trainer.train.strategies.base import Strategy

STRATEGIES: Final = {
    "single": "base:Single",
    "ddp": "ddp:DDP",
    "manual_allreduce": "manual:ManualAllReduce",
    "manual_rs_ag": "manual:ManualReduceScatterAllGather",
    "data_parallel": "data_parallel:DataParallel",
    "fsdp": "fsdp:FSDP",
    "hsdp": "hsdp:HSDP",
    "pipeline": "pipeline:Pipeline",
}
"""Module and class of each strategy. Named, not imported: a run pays for the one it uses."""


def strategy_class(name: str) -> type[Strategy]:
    """The class behind `--strategy NAME`. Raises UserError when there is none."""
    if name not in STRATEGIES:
        close = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(STRATEGIES)}"
        raise UserError(f"--strategy {name} is unknown: {hint}")
    module, _, found_name = STRATEGIES[name].partition(":")
    found: type[Strategy] = getattr(importlib.import_module(f"{__name__}.{module}"), found_name)
    return found
