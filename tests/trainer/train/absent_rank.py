"""The doctor, with a rank 1 that has started but never answers."""

from __future__ import annotations

import os
import signal
import sys

from ddp_trainer import doctor

if os.environ["RANK"] == "1":
    doctor.roll_call = lambda world, timeout: signal.pause()
sys.exit(doctor.main(sys.argv[1:]))
