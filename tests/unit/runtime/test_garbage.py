"""Collections of garbage stay short. In a process of its own, because the collector is the whole process's."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.processes


def in_a_process(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_what_has_survived_a_full_collection_is_not_visited_again() -> None:
    assert (
        in_a_process("""
        import gc
        from ddpjob_operator.runtime.garbage import keep_collections_short
        keep_collections_short()
        kept = [[number] for number in range(200_000)]
        gc.collect()
        print(len(gc.get_objects()) < 1000)
    """)
        == "True"
    )


def test_cycles_are_collected_all_the_same() -> None:
    assert (
        in_a_process("""
        import gc, weakref
        from ddpjob_operator.runtime.garbage import keep_collections_short
        class Node: pass
        keep_collections_short()
        alive = []
        for _ in range(100_000):
            node = Node()
            node.itself = node
            alive.append(weakref.ref(node))
        del node
        print(sum(ref() is not None for ref in alive) < 50_000)
    """)
        == "True"
    )


def test_a_connection_that_failed_is_freed_although_its_error_was_held_over_a_collection() -> None:
    """kopf holds it while it waits for its next try, and each try of an outage was kept for ever."""
    assert (
        in_a_process("""
        import asyncio, gc, socket, weakref
        import aiohttp
        from ddpjob_operator.runtime.garbage import keep_collections_short
        from ddpjob_operator.runtime.login import Login, open_session
        async def main(port):
            errors = []
            async with open_session(Login("", None, {}, None, None)) as session:
                for _ in range(10):
                    try:
                        await session.get(f"http://127.0.0.1:{port}")
                    except aiohttp.ClientConnectorError as error:
                        errors.append(weakref.ref(error))
                        gc.collect()
            gc.collect()
            return len(errors), sum(ref() is not None for ref in errors)
        keep_collections_short()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and nobody listens
            print(asyncio.run(main(taken.getsockname()[1])))
    """)
        == "(10, 0)"
    )


def test_a_cycle_that_was_abandoned_late_is_freed_when_all_is_collected() -> None:
    assert (
        in_a_process("""
        import asyncio, gc, weakref
        from ddpjob_operator.runtime import garbage
        class Node: pass
        async def main():
            node = Node()
            node.itself = node
            alive = weakref.ref(node)
            kept = [[number] for number in range(200_000)]
            gc.collect()
            del node
            gc.collect()
            before = alive() is not None
            collecting = asyncio.create_task(garbage.collect_all_every_hour())
            async with asyncio.timeout(60):
                while alive() is not None:
                    await asyncio.sleep(0.01)
            return before, len(gc.get_objects()) < 10_000
        garbage.ALL_SECONDS = 0.1
        garbage.keep_collections_short()
        print(asyncio.run(main()))
    """)
        == "(True, True)"
    )
