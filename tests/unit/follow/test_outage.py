"""Which errors of the API server pass, and how long what follows a job goes on without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.unit.virtual_time import run

from ddpjob_operator.follow.outage import SECONDS_WITHOUT_ANSWER, Patient
from ddpjob_operator.runtime.errors import ApiError

AWAY, GOOD = 0, 200


def follow(*answers: int, seconds: float = 0) -> tuple[list[str], float]:
    """The notes and the seconds until all answers are read. Each call takes so many seconds; the last answer stays."""
    notes, left = list[str](), list(answers)

    async def ask() -> None:
        await asyncio.sleep(seconds)
        status = left.pop(0) if len(left) > 1 else left[0]
        if status != GOOD:
            raise ApiError(status, "Reason", f"status {status}")

    async def followed() -> float:
        patient = Patient(notes.append)
        for _ in range(answers.count(GOOD)):
            await patient.read(ask)
        if answers[-1] != GOOD:
            with pytest.raises(ApiError, match=f"status {answers[-1]}"):
                await patient.read(ask)
        return asyncio.get_running_loop().time()

    spent = run(followed())
    return notes, spent


@pytest.mark.parametrize("status", [AWAY, 429, 500, 503, 504])
def test_what_passes_is_waited_for_and_noted_once_in_each_outage(status: int) -> None:
    outage: Sequence[int] = [status] * 100
    notes, spent = follow(GOOD, *outage, GOOD, GOOD, *outage, GOOD)
    assert notes == [f"status {status}; trying again"] * 2
    assert spent == 200


@pytest.mark.parametrize("status", [401, 403, 404, 410, 422])
def test_what_does_not_pass_is_raised_at_once(status: int) -> None:
    assert follow(GOOD, status) == ([], 0)
    assert follow(GOOD, AWAY, status)[1] == 1, "also in an outage"


def test_the_first_call_is_made_once() -> None:
    assert follow(AWAY) == ([], 0)


def test_how_long_an_answer_took_says_nothing_of_the_outage_before_it() -> None:
    left = [ApiError(503, "Reason", "away")] * 9

    async def ask(seconds: float) -> None:
        await asyncio.sleep(seconds)
        if seconds > 1 and left:
            raise left.pop()

    async def read() -> list[float]:
        patient, took = Patient(), list[float]()
        for seconds in (1, 3, 0):
            await patient.read(ask, seconds)
            took.append(patient.took)
        return took

    assert run(read()) == [1, 3, 0]


@pytest.mark.parametrize("seconds", [0, 15])
def test_an_outage_that_does_not_end_is_raised_after_minutes(seconds: float) -> None:
    notes, spent = follow(GOOD, AWAY, seconds=seconds)
    assert notes == ["status 0; trying again"]
    assert SECONDS_WITHOUT_ANSWER <= spent <= SECONDS_WITHOUT_ANSWER + 3 * seconds + 1
