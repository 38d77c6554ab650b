"""torchrun and ranks that are forked by servers, one for each set of modules that a server has imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.support.waiting import eventually

HERE = Path(__file__).parent
TORCH = (
    "torch",
    "torch.distributed.run",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.utils.tensorboard",
    "safetensors.torch",
)
LIBRARIES = ("transformers.trainer", "transformers.models.bert.modeling_bert", "lightning.pytorch", "accelerate")
_servers: list[subprocess.Popen[bytes]] = []


def command(ranks: int, *arguments: str, imported: tuple[str, ...] = ()) -> list[str]:
    """What runs `-m MODULE …` or `SCRIPT …` in so many ranks of a torchrun; 0 is one process without torchrun."""
    forked = [sys.executable, "-SE", str(HERE / "client.py"), _address(TORCH + imported)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python"]
    return [*forked, *torchrun, *forked, *arguments] if ranks else [*forked, *arguments]


@cache
def _address(imported: tuple[str, ...]) -> str:
    """Of the server that has imported these."""
    address = Path(tempfile.mkdtemp(prefix="ranks-"), "socket")
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), str(address), *imported],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
    )
    _servers.append(server)
    eventually(lambda: address.exists() or server.poll() is not None, "the server of forked ranks")
    assert server.poll() is None
    return str(address)


def stop() -> None:
    """End them. One whose pytest has been killed ends as well: its standard input does."""
    while _servers:
        server = _servers.pop()
        server.communicate()
        shutil.rmtree(Path(str(server.args[2])).parent)  # type: ignore[index]
    _address.cache_clear()
