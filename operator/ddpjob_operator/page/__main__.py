"""The pages as a Service of a cluster: `python -m ddpjob_operator.page --address '*' --all-namespaces`.

`ddpjob dashboard` for a pod: with its service account, without the packages of the command. There is no login.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import sys
from collections.abc import Sequence

from ddpjob_operator.page.cluster import ClusterSource
from ddpjob_operator.page.links import LinkTemplate, parse_template
from ddpjob_operator.page.server import serve
from ddpjob_operator.runtime.client import connect
from ddpjob_operator.runtime.errors import ApiError

_WARNING = (
    "there is no login: everybody who reaches this port sees jobs and logs; put an authenticating proxy before it"
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ddpjob_operator.page", description=__doc__)
    parser.add_argument("--address", default="127.0.0.1", help="to listen on; '*' is all")
    parser.add_argument("--port", type=int, default=8265)
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--namespace", help="whose jobs are shown; the pod's own if neither is given")
    scope.add_argument("--all-namespaces", action="store_true")
    parser.add_argument("--host", action="append", default=[], help="a name by which requests may call this server")
    parser.add_argument("--link", action="append", default=[], help="TITLE=URL")
    given = parser.parse_args(arguments)
    try:
        links = [parse_template(text) for text in given.link]
        asyncio.run(_serve(given, links))
    except ValueError as error:
        parser.error(f"--link {error}")
    except (ApiError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(given: argparse.Namespace, links: Sequence[LinkTemplate]) -> None:
    """Until SIGTERM, which process 1 of a pod would ignore, or Ctrl-C."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    client = await connect(agent="ddpjob-dashboard")
    try:
        source = ClusterSource(client, None if given.all_namespaces else given.namespace or client.namespace)
        names = frozenset(name.lower() for name in given.host)
        runner, url = await serve(source, given.address, given.port, links, names)
        gc.freeze()  # as the command does
        print(f"{url} shows the jobs of {source.where}; {_WARNING}", flush=True)
        await stopped.wait()
        await runner.cleanup()
    finally:
        await client.close()


if __name__ == "__main__":
    sys.exit(main())
