"""Values of the program's own: which names and numbers those that it logs may have, and how many there may be; whole
numbers and settings, which have to be such in a manifest, or no snapshot could be read again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Final

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.standard_error import say

MOST_VALUES: Final = 64
"""Names of values that a run may log: each is a series of Prometheus."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,63}")


def whole(call: str, name: str, value: Any) -> int:
    """The number, which a tensor or NumPy may have counted. Raises UserError for what is no whole number of at least 0,
    such as text: an argument that was not converted.
    """
    elements = getattr(value, "numel", None)
    try:
        # what a tensor raises is not caught: it may wait here for another rank, or for the device
        is_one = not isinstance(value, str) and (not callable(elements) or elements() == 1)
        number = int(value) if is_one else 0
        is_whole = is_one and number >= 0 and bool(number == value)
    except (TypeError, ValueError, OverflowError):
        number, is_whole = 0, False
    if not is_whole:
        raise UserError(f"{call}(…, {name}={value!r}): give a whole number of at least 0")
    return number


def settings(config: Any) -> dict[str, Any]:
    """`config` as JSON, mappings in it that are no dict included, such as those of OmegaConf. Raises UserError."""
    if not isinstance(config, Mapping):
        raise UserError(
            f"attach(…, config=…): the settings are a {type(config).__qualname__}, not a mapping; give a dict, such as "
            "vars(arguments) of argparse, or dataclasses.asdict(settings)"
        )
    try:
        found = json.loads(json.dumps(_plain(config), default=_plain))
    except Exception as error:  # a setting may be of any kind
        raise UserError(f"attach(…, config=…): the settings cannot be noted as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"attach(…, config=…): the settings cannot be noted as JSON: {found!r:.200}")
    return found


def _plain(value: Any) -> Any:
    """OmegaConf's as written: a manifest is for others to read, and `${oc.env:TOKEN}` stays that. A mapping that is no
    JSON, or has no values yet, is its text: it is only a note.
    """
    omegaconf = getattr(sys.modules.get("omegaconf"), "OmegaConf", None)
    try:
        if omegaconf is not None and omegaconf.is_config(value):
            return omegaconf.to_container(value, resolve=False, enum_to_str=True)
        plain = dict(value) if isinstance(value, Mapping) else str(value)
    except Exception:
        return str(value)
    is_json = isinstance(plain, str) or all(isinstance(key, str | int | float | None) for key in plain)
    return plain if is_json else str(value)


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
