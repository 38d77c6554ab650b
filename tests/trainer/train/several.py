"""Several whole runs of the trainer, one after another in the same ranks: starting torchrun takes longer than
any of them.

`several.py RUNS.json`, a mapping of job names to argument lists. Nothing here is made to fail. As in
`train.main`, but in one process group: ranks that leave one and make another at the same address meet the
store of the old one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.rank.world import describe_world, process_group
from ddp_trainer.train.build import build
from ddp_trainer.train.command_line import parse
from ddp_trainer.train.config import check_world

world = describe_world(device="cpu")
with process_group(world, timeout_seconds=120):
    for job, arguments in json.loads(Path(sys.argv[1]).read_text()).items():
        print(job, flush=True)
        os.environ["DDPJOB_NAME"] = job
        config = parse(arguments)
        check_world(config, world_size=world.size, device="cpu")
        build(config, world, Heartbeat.from_env()).run()
