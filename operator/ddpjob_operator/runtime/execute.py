"""A command in a container of a pod, as `kubectl exec` runs one: over a websocket, with bytes as they are.

The protocol is v4.channel.k8s.io, which every API server since 1.4 speaks. Each message begins with the number of its
channel. On the last one a Status says how the command ended.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import aiohttp

from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.decode import decode
from ddpjob_operator.runtime.errors import ApiError

PROTOCOL = "v4.channel.k8s.io"
STDOUT, STDERR, ENDED = 1, 2, 3
"""Channels."""
_MOST_ERRORS = 4096
"""Bytes of standard error that are kept for the message."""
_FORBIDDEN = 403


async def output_of(client: Client, pod: str, container: str, command: Sequence[str]) -> AsyncGenerator[bytes, None]:
    """The standard output of a command in the pod at this path, in pieces of some kB. It is read as fast as the caller
    takes it.

    Raises:
        ApiError: the server refused, or the command failed, with what it wrote to standard error. Status 0 and reason
            `ConnectionFailed`: the connection broke, before the command had ended as far as is known.
    """
    query = [*(("command", word) for word in command), ("container", container), ("stdout", "true"), ("stderr", "true")]
    path, errors = f"{pod}/exec", b""
    try:
        async with client.socket(path, query, PROTOCOL) as socket:
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                    continue
                channel, data = message.data[0], message.data[1:]
                if channel == STDOUT and data:
                    yield data
                elif channel == STDERR:
                    errors = (errors + data)[-_MOST_ERRORS:]
                elif channel == ENDED and data:
                    _raise_unless_succeeded(data, errors)
                    return
    except ApiError as error:
        name = pod.rpartition("/")[2]
        if error.status == _FORBIDDEN:
            what = f"you may not run a command in pod {name}"
            what += ": ask for get and create on pods/exec, as the role edit has it"
        elif error.not_found:
            what = f"pod {name} is gone: it was stopped or deleted meanwhile"
        else:
            raise
        raise ApiError(error.status, error.reason, what) from None
    raise ApiError(0, "ConnectionFailed", f"GET {path}: the connection ended before the command did")


def _raise_unless_succeeded(data: bytes, errors: bytes) -> None:
    try:
        ended = decode(data)
    except ValueError:
        raise ApiError(0, "BadAnswer", f"the command ended with {data[:200]!r}") from None
    if ended.get("status") != "Success":
        said = " ".join(errors.decode(errors="replace").split()) or ended.get("message") or "it does not say why"
        raise ApiError(0, "Failed", f"the command in the pod failed: {said}")
