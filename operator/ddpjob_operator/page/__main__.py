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
from pathlib import Path

from ddpjob_operator.page.cluster import ClusterSource
from ddpjob_operator.page.links import LinkTemplate, parse_template
from ddpjob_operator.page.server import serve
from ddpjob_operator.page.volumes import Volumes
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
    parser.add_argument("--shared", type=Path, metavar="DIR", help="where a volume of jobs is mounted; it is only read")
    parser.add_argument("--volume-of", metavar="NAMESPACE/CLAIM", help="the claim; '*': DIR has a folder of each")
    given = parser.parse_args(arguments)
    if (given.shared is None) != (given.volume_of is None):
        parser.error("--shared, --volume-of: give both, a folder and whose volume it is, or none")
    try:
        volumes = None if given.shared is None else Volumes.at(given.shared, given.volume_of)
    except ValueError as error:
        parser.error(str(error))
    try:
        links = [parse_template(text) for text in given.link]
    except ValueError as error:
        parser.error(f"--link {error}")
    try:
        asyncio.run(_serve(given, links, volumes))
    except (ApiError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(given: argparse.Namespace, links: Sequence[LinkTemplate], volumes: Volumes | None) -> None:
    """Until SIGTERM, which process 1 of a pod would ignore, or Ctrl-C."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    client = await connect(agent="ddpjob-dashboard")
    try:
        namespace = None if given.all_namespaces else given.namespace or client.namespace
        source = ClusterSource(client, namespace, volumes=volumes)
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
