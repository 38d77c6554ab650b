"""How long the operator's probe takes to answer at most, and that of a server beside it that does nothing else.

    python -m tests.api_server.prober PORT PID

runs until standard input ends, and prints both. A process of its own asks: a benchmark that makes a thousand jobs is
held up by itself. What the idle server takes is the machine's part: processes that wait for a core. All three go before
other processes, where that is allowed: an API server with cores of its own does not keep the operator waiting for one.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
from contextlib import suppress
from pathlib import Path

import aiohttp
from tests.support.ports import free_port

from ddpjob_operator import server

PAUSE_SECONDS = 0.05


def main() -> None:
    port, idle_port = int(sys.argv[1]), free_port()
    idle = multiprocessing.get_context("spawn").Process(target=_serve_idle, args=(idle_port,), daemon=True)
    idle.start()
    with suppress(PermissionError):
        for pid in (os.getpid(), idle.pid or 0, *map(int, sys.argv[2:])):
            # each thread has a priority of its own, and one that waits for a core may hold the interpreter's lock
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), -20)
    asyncio.run(_ask(port, idle_port))
    idle.terminate()


def _serve_idle(port: int) -> None:
    async def forever() -> None:
        await server.serve_probes(port, healthy=list, ready=list)
        await asyncio.Event().wait()

    asyncio.run(forever())


async def _ask(port: int, idle_port: int) -> None:
    found = {"longest": 0.0, "idle": 0.0, "unanswered": 0}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        await _answers(session, idle_port)
        asking = [
            asyncio.create_task(_keep_asking(session, port, "longest", found)),
            asyncio.create_task(_keep_asking(session, idle_port, "idle", found)),
        ]
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    print(json.dumps(found))


async def _answers(session: aiohttp.ClientSession, port: int) -> None:
    for _ in range(600):
        try:
            async with session.get(f"http://127.0.0.1:{port}/healthz"):
                return
        except aiohttp.ClientError:
            await asyncio.sleep(0.1)
    raise TimeoutError(f"nothing answers on port {port}")


async def _keep_asking(session: aiohttp.ClientSession, port: int, name: str, found: dict[str, float]) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        began = clock()
        try:
            async with session.get(f"http://127.0.0.1:{port}/healthz") as answer:
                await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            found["unanswered"] += 1
        found[name] = max(found[name], clock() - began)
        await asyncio.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
