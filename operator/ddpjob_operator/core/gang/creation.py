"""The backoff of creation: a pod that vanishes before it has run is not a failure, and costs no restart, but it is not
created again without end at no wait either.

The count is that of one process of the operator: another one begins anew. It also begins anew where ten minutes lie
between two creations, as with the kubelet's restarts of a container: with live recovery an attempt may take months.
"""

from __future__ import annotations

from datetime import datetime

from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import Creations

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
FORGOTTEN_SECONDS = 600.0
"""Between two creations, after which the first does not count."""


def counted(known: Creations | None, now: datetime) -> Creations:
    """The creations of a pod, with one `now`."""
    if known is None or (now - known.at).total_seconds() > FORGOTTEN_SECONDS:
        return Creations(1, now)
    return Creations(known.count + 1, now)


def until_creatable(look: Look, name: str) -> float:
    """Seconds until the pod `name` may be created; 0 if it may now. The second time comes at once, then the wait
    doubles."""
    known = look.observed.creations.get(name)
    if known is None or known.count < 2:
        return 0.0
    wait = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(known.count - 2, 30))
    left = wait - look.seconds_since(known.at)
    return left if 0 < left <= wait else 0.0  # more: the clock was set back
