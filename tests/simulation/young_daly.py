"""Young's and Daly's closed forms for training with snapshots at a fixed interval and exponential failures.

J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974; J. T. Daly, A higher
order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22(3), 2006.
All times are in seconds. `mtbf` is M, `interval` is tau (training between two snapshots), `stall` is delta (training
stops for a snapshot), `recovery` is R (from a failure to the next training step).
"""

from __future__ import annotations

import math


def wall_time(work: float, mtbf: float, interval: float, stall: float, recovery: float) -> float:
    """Expected wall time of `work` seconds of training: M e^(R/M) (e^((tau+delta)/M) - 1) Ts/tau (Daly)."""
    return mtbf * math.exp(recovery / mtbf) * math.expm1((interval + stall) / mtbf) * work / interval


def goodput(mtbf: float, interval: float, stall: float, recovery: float) -> float:
    """Share of the wall time that is kept training, by Daly's expected wall time."""
    return 1.0 / wall_time(1.0, mtbf, interval, stall, recovery)


def young_goodput(mtbf: float, interval: float, stall: float, recovery: float) -> float:
    """The same to first order in 1/M: stalls, and for each failure half an interval and the recovery."""
    return 1.0 / (1.0 + stall / interval + (interval / 2.0 + recovery) / mtbf)


def young_interval(mtbf: float, stall: float) -> float:
    """Young's optimum interval, sqrt(2 delta M)."""
    return math.sqrt(2.0 * stall * mtbf)


def daly_interval(mtbf: float, stall: float) -> float:
    """Daly's optimum interval, to a higher order."""
    if stall >= 2.0 * mtbf:
        return mtbf
    ratio = math.sqrt(stall / (2.0 * mtbf))
    return math.sqrt(2.0 * stall * mtbf) * (1.0 + ratio / 3.0 + ratio**2 / 9.0) - stall
