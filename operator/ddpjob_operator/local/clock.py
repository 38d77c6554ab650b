"""The time of a run on this machine, by which its deadlines and waits are kept.

The clock of a machine is set while jobs run: by NTP, or by a person. A run that went by it would end an hour early, or
wait for an hour, so its time goes on from that of its start as fast as the monotonic clock, which nobody sets. A
suspended machine counts, as it does in a cluster.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BEGAN, _BEGAN_AT = datetime.now(UTC), time.clock_gettime(_STEADY)


def now() -> datetime:
    """In UTC; of two calls, the later one never has the earlier time."""
    return _BEGAN + timedelta(seconds=time.clock_gettime(_STEADY) - _BEGAN_AT)
