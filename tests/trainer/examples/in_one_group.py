"""Several examples of docs/trainer.md, one after another in the same ranks: starting torchrun takes longer than any.

`in_one_group.py EXAMPLES.json RESULTS.json`: a list of {"environment", "arguments"}. Each is run as `ddp_trainer.train`
would, but in one process group. Nothing here is made to fail; a refusal before training ends only the example.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path

import torch

from ddp_trainer.contract.exit_codes import EXIT_OK, UserError
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.rank.world import World, describe_world, process_group
from ddp_trainer.train.build import build
from ddp_trainer.train.command_line import parse
from ddp_trainer.train.config import check_scope, check_world


def train(world: World, arguments: list[str]) -> int:
    """`train.exit_code`, without a process group of its own."""
    try:
        config = parse(arguments)
        check_scope(config, is_live=False)
        check_world(config, world_size=world.size, device=world.device.type, devices=torch.cuda.device_count())
        build(config, world, Heartbeat.from_env()).run()
    except UserError as refusal:
        print(f"ddp_trainer.train: {refusal}")
        return refusal.exit_code
    return EXIT_OK


sys.path.insert(0, "")
world = describe_world(device="cpu")
results = []
with process_group(world, timeout_seconds=120):
    for example in json.loads(Path(sys.argv[1]).read_text()):
        before = dict(os.environ)
        os.environ.update(example["environment"])
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                code = train(world, example["arguments"])
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
                raise
        os.environ.clear()
        os.environ.update(before)
        results.append({"code": code, "output": output.getvalue()})
        if world.leads:
            Path(sys.argv[2]).write_text(json.dumps(results))
