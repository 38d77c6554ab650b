"""Removes the operator's finalizer from all pods: `python -m ddpjob_operator.cluster.release`.

The chart runs it after `helm uninstall`. Without an operator nothing else would, and pods that are deleted later would
stay Terminating. Pods that run go on.
"""

from __future__ import annotations

import asyncio
import sys

from ddpjob_operator import settings as configuration
from ddpjob_operator.cluster import paths
from ddpjob_operator.cluster.apply import Applier
from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.core.values.actions import ReleasePod
from ddpjob_operator.runtime.client import Client, connect
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.settings import BadSetting
from ddpjob_operator.wire.pods import is_held


async def release_everywhere(client: Client, namespaces: tuple[str, ...]) -> int:
    """Release every pod of these namespaces, or of all if none is named, also one that has lost its labels.

    Returns:
        how many there were.

    Raises:
        ApiError: some could not be released, or some namespaces not listed; every other one has been.
    """
    applier, count, failures = Applier(client, Cache()), 0, list[ApiError]()
    for namespace in namespaces or (None,):
        try:
            async for page in client.pages(paths.pods(namespace), "pods"):
                for pod in filter(is_held, page.items):
                    meta = pod["metadata"]
                    try:
                        await applier.release(meta["namespace"], ReleasePod(meta["name"], meta["uid"]))
                    except ApiError as error:
                        failures.append(error)
                    count += 1
        except ApiError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return count


async def _run(namespaces: tuple[str, ...]) -> int:
    client = await connect()
    try:
        return await release_everywhere(client, namespaces)
    finally:
        await client.close()


def main() -> int:
    """Returns 0, 1 where a pod keeps its finalizer, 64 for a bad setting."""
    try:
        print(f"{asyncio.run(_run(configuration.load().namespaces))} pods released")
    except BadSetting as error:
        print(f"release: {error}", file=sys.stderr)
        return configuration.EXIT_BAD_SETTING
    except (ApiError, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
