"""How many examples hypothesis tries a property with."""

from __future__ import annotations

from typing import Final

from hypothesis import settings

QUICK: Final = "quick"
"""The profile of `make check`: a quarter of the examples, which find a mistake in a change within a minute. `make test`
has all of them.
"""


def examples(count: int) -> int:
    """For `max_examples` of a property with a number of its own. Where it is asked for, the profile is chosen."""
    return count // 4 if settings.get_current_profile_name() == QUICK else count
