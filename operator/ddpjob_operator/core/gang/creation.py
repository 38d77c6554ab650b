"""The backoff of creation: a pod that vanishes before it has run is not a failure, and costs no restart, but it is not
created again without end at no wait either.

The count is that of one process of the operator: another one begins anew.
"""

from __future__ import annotations

from ddpjob_operator.core.values.look import Look

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0


def until_creatable(look: Look, name: str) -> float:
    """Seconds until the pod `name` may be created; 0 if it may now. The second time comes at once, then the wait
    doubles."""
    known = look.observed.creations.get(name)
    if known is None or known.count < 2:
        return 0.0
    wait = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(known.count - 2, 30))
    left = wait - look.seconds_since(known.at)
    return left if 0 < left <= wait else 0.0  # more: the clock was set back
