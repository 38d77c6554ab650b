"""Process groups of views, formed by real processes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.forked import start as forked

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from ddp_trainer.live import membership
from ddp_trainer.live.membership import Membership
from ddp_trainer.live.register import Register
from ddp_trainer.live.views import Member, View

folder, rank, ended = Path(sys.argv[1]), int(sys.argv[2]), Member("ended", 1, 0, "127.0.0.1", int(sys.argv[3]))
register = Register(folder)
one = Membership(register, node_rank=rank, local_rank=0, host="127.0.0.1", least=1, timeout_seconds=60.0)
if rank == 0:
    membership.FORM_SECONDS = 1.0
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
    one.view = register.propose(View(0, (one.own, ended), ended.id, "127.0.0.1", store.port))
    while not one.has_newcomer:
        time.sleep(0.01)
    one._settle(one.view)
else:
    one.begin(2)
total = torch.ones(1)
dist.all_reduce(total)
print(one.view.number, one.rank, total.item())
one.close()
"""


@pytest.mark.processes
def test_a_newcomer_forms_the_group_with_one_that_failed_to_form_the_view_before(tmp_path: Path) -> None:
    """torch counts each group that a process begins to form, and meets under this number: a newcomer has begun none."""
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    command = [*forked.command(0, str(script)), str(tmp_path / "views")]
    port = str(free_port())
    own = os.environ | {"PYTHONPATH": str(ROOT / "trainer_image")}
    ranks = [
        subprocess.Popen([*command, str(rank), port], env=own, stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=PATIENCE_SECONDS)[0].split() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert printed == [["1", "0", "2.0"], ["1", "1", "2.0"]]
