"""What an answer of the API server means."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ddpjob_operator.runtime.answers import retry_after_seconds

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.fault(5)
@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.5),
        ("17", 17),
        ("-5", 0.5),
        ("Fri, 02 Jan 2026 03:05:05 GMT", 60),
        ("Fri, 02 Jan 2026 03:00:00 GMT", 0.5),
        ("soon", 1),
        ("", 1),
    ],
)
def test_retry_after_is_a_number_or_a_date(value: str, seconds: float) -> None:
    assert retry_after_seconds(value, NOW) == seconds
