"""The runs of this process, of which a job has one: a second one would go on from what the first has saved, whatever
its model, and two at once would take the snapshots of one another for their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from ddp_trainer.contract.exit_codes import UserError

Key = tuple[Path, str, int, bool]
"""What tells runs apart: logs of the job, UID, attempt, and whether they have states."""

_ended: Final[dict[Key, int | None]] = {}
"""The step at which each ended, None where it was stopped."""

_resumed: Final[WeakValueDictionary[Key, object]] = WeakValueDictionary()
"""The one that has resumed last. A loop that failed, and is begun again with a new `attach`, leaves its run behind."""

_FIX: Final = (
    "a job has one run. Give all models to one attach(), or run each in a job of its own (without an operator: with a "
    "DDPJOB_NAME of its own)"
)


def resumes(key: Key, run: object) -> None:
    """This run is used from now on."""
    _resumed[key] = run


def is_last(key: Key, run: object) -> bool:
    """Whether no other run of the same job has resumed in this process since this one did."""
    return _resumed.get(key, run) is run


def check_is_last(key: Key, run: object, call: str) -> None:
    """Raises UserError where another one has."""
    if not is_last(key, run):
        raise UserError(
            f"run.{call}() was called on a run of the job {key[0].name}, and another one, of a later attach(), has "
            f"resumed in this process: {_FIX}"
        )


def has_ended(key: Key, step: int | None) -> None:
    """This run has come to its end at this step; None says that it was stopped."""
    _ended[key] = step


def check_trains_once(key: Key) -> None:
    """Raises UserError where a library begins to train, and a training of this run has come to its end before."""
    if key in _ended:
        last = _ended[key]
        before = "was stopped in a run" if last is None else f"has trained to step {last}"
        raise UserError(
            f"this process {before} of the job {key[0].name} before, and a "
            "job has one run: checkpoints of two would be taken for one another. Train each in a job of its own, "
            "or leave the callback out of the second. To train on, let the first take more steps"
        )


def check_not_ended(key: Key, step: int, total_steps: int | None) -> None:
    """Raises UserError where a run that resumes after `step` would do so at the end of another one, with its states,
    and do nothing.
    """
    if key not in _ended:
        return
    last = _ended[key]
    if last is None or (step == last and (total_steps is None or total_steps <= step)):
        raise UserError(
            f"this process has finished its run of the job {key[0].name}, at step {step}, and attach() was "
            f"called again: {_FIX}. To go on with the same run, give attach() its total_steps"
        )
