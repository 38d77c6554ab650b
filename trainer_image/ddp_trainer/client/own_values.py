"""Values of the program's own that it logs: which names and numbers they may have, and how many there may be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.standard_error import say

MOST_VALUES: Final = 64
"""Names of values that a run may log: each is a series of Prometheus."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,63}")


class OwnValues:
    """Knows the names that a run has logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._has_refused = False

    def accepted(self, values: Mapping[str, float]) -> dict[str, float]:
        """The values as numbers, without those beyond MOST_VALUES names, of which the first is reported.

        Raises UserError for what is no number, and for what is no name.
        """
        numbers = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError) as error:
                raise UserError(f"run.log: {name} is {value!r}, which is not a number") from error
            if not _NAME.fullmatch(name):
                raise UserError(
                    f"run.log: {name!r} is no name of a value; use a letter, then up to 63 letters, digits and _ . / -"
                )
        refused = sorted(numbers.keys() - self._logged)[max(0, MOST_VALUES - len(self._logged)) :]
        if refused and not self._has_refused:
            self._has_refused = True
            say(f"ddp_trainer: {refused[0]!r} is not reported: a run logs {MOST_VALUES} values")
        numbers = {name: value for name, value in numbers.items() if name not in refused}
        self._logged |= numbers.keys()
        return numbers
