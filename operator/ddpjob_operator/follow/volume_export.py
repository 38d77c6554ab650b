"""A model from the volume of a job to this machine: a short-lived pod writes it to a folder of its own, and it is read
from there as `kubectl exec` reads, with sums that the pod has taken.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ddpjob_operator.core.manifests.volume_pod import LONGEST_SECONDS
from ddpjob_operator.follow.volume_pod import FREE, SECONDS_BETWEEN_LOOKS, Note, exit_code, log_of, started_pod
from ddpjob_operator.follow.volume_snapshots import ROLE, pod_on_volume
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.execute import output_of

MOST_TRIES = 5
"""Connections in a row that bring nothing, after which it is given up."""
MOST_LINES = 1000
"""Of a command that fails, the last ones: its image may print without end."""
_FOLDER = "/tmp/export"  # noqa: S108 - a mount of the pod
_KILLED = 137
_FOR_NOW = (429, 500, 502, 503, 504)
"""Answers of an API server that is busy or restarts, or does not reach the kubelet."""
_OLDER_IMAGE = "unrecognized arguments: --hold"

Moved = Callable[[str, int, int], None]
"""Takes a file's name, how many bytes of it are here, and how many it has."""


@dataclass(frozen=True, slots=True)
class Held:
    """A file that waits in the pod."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Export:
    """What an export came to."""

    code: int
    """Exit code of the trainer's command; 0: all is here."""
    step: int | None = None
    files: tuple[Path, ...] = ()


async def export(
    client: Client,
    namespace: str,
    name: str,
    to: Path,
    *,
    state: str,
    step: int | None,
    image: str | None,
    say: Note,
    note: Note,
    moved: Moved,
) -> Export:
    """Write a state of a job's newest valid snapshot, or of that of a step, into the folder `to`.

    All files come and are compared before the first one gets its name. `say` gets the lines of a command that failed.

    Raises:
        ApiError: there is no such job, the pod could not be made or did not start, the files cannot be read from it or
            written here, or what came has another sum.
    """
    of_step = () if step is None else ("--step", str(step))
    options = ("--state", state, "--to", _FOLDER, "--hold", str(LONGEST_SECONDS), *of_step)
    manifest, _ = await pod_on_volume(client, namespace, name, "export", options, image)
    async with started_pod(client, namespace, manifest, FREE, note) as pod:
        lines = deque[str](maxlen=MOST_LINES)
        found = await _held(client, pod, state, lines)
        if found is None:
            return Export(_explained(await exit_code(client, pod, ROLE), lines, say))
        taken, files = found
        with _written_whole(to, files) as parts:
            for held, part in zip(files, parts, strict=True):
                with part.open("wb") as file:
                    await _fetch(client, pod, held, file, moved)
        return Export(0, taken, tuple(to / held.name for held in files))


async def _held(client: Client, pod: str, state: str, lines: deque[str]) -> tuple[int, tuple[Held, ...]] | None:
    """What waits in the pod, once it does; None if its log has ended without it. Other lines are added to `lines`."""
    async with aclosing(log_of(client, pod, ROLE)) as log:
        async for line in log:
            if (found := parse_held(line, state)) is not None:
                return found
            lines.append(line)
    return None


def parse_held(line: str, state: str) -> tuple[int, tuple[Held, ...]] | None:
    """The step and the files that a line of the pod tells of; None for any other line, such as a warning.

    The names are those that were asked for, whatever the pod says: it runs a user's image.
    """
    if not line.startswith('{"step"'):
        return None
    try:
        found = json.loads(line)
        by_name = {str(file["name"]): file for file in found["files"]}
        names = f"{state}.pt", f"{state}.safetensors"
        files = tuple(Held(item, int(by_name[item]["bytes"]), str(by_name[item]["sha256"])) for item in names)
        return int(found["step"]), files
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _explained(code: int, lines: Iterable[str], say: Note) -> int:
    if any(_OLDER_IMAGE in line for line in lines):
        what = "the trainer image is older than this, and its export cannot be read from outside"
        raise ApiError(0, "OlderImage", f"{what}; name a newer one with --image")
    for line in lines:
        say(line)
    if code == _KILLED:
        what = "the pod that loads the snapshot was killed, as when it needs more memory than it may use"
        raise ApiError(0, "Killed", f"{what}; give the job more memory (spec.resources.limits.memory)")
    return code or 1  # it is to hold the files, not to end


@contextmanager
def _written_whole(to: Path, files: Sequence[Held]) -> Iterator[tuple[Path, ...]]:
    """A new file for each of these, which gets its name if the block ends without an error, and else is removed."""
    parts: list[Path] = []
    try:
        to.mkdir(parents=True, exist_ok=True)
        for held in files:
            descriptor, part = tempfile.mkstemp(prefix=f".{held.name}-", dir=to)
            os.close(descriptor)
            parts.append(Path(part))
        yield tuple(parts)
        for held, path in zip(files, parts, strict=True):
            path.chmod(0o644)
            path.replace(to / held.name)
    except OSError as error:
        raise ApiError(0, "CannotWrite", f"{error.filename or to}: {error.strerror}") from error
    finally:
        for path in parts:
            path.unlink(missing_ok=True)


async def _fetch(client: Client, pod: str, held: Held, to: BinaryIO, moved: Moved) -> None:
    """Bring all of a file; a connection that ends early is made again for what is missing.

    Raises:
        ApiError: connections bring nothing any more, or what came has another sum.
        OSError: it cannot be written.
    """
    digest, here, tries = hashlib.sha256(), 0, 0
    moved(held.name, here, held.bytes)
    while here < held.bytes:
        before, problem = here, "the command ended early"
        read = ("tail", "-c", f"+{here + 1}", f"{_FOLDER}/{held.name}")
        try:
            async with aclosing(output_of(client, pod, ROLE, read)) as pieces:
                async for piece in pieces:
                    if here + len(piece) > held.bytes:
                        raise _damaged(held.name)
                    to.write(piece)
                    digest.update(piece)
                    here += len(piece)
                    moved(held.name, here, held.bytes)
        except ApiError as error:
            if error.status not in _FOR_NOW and (error.status, error.reason) != (0, "ConnectionFailed"):
                raise
            problem = error.message
        tries = 0 if here > before else tries + 1
        if tries >= MOST_TRIES:
            what = f"the last {MOST_TRIES} connections brought nothing, {here} of {held.bytes} bytes are here"
            raise ApiError(0, "ConnectionFailed", f"{held.name}: {what}: {problem}")
        if here < held.bytes:
            await client.get(pod, "pods")  # raises where the API server itself does not answer, or the pod is gone
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
    if here != held.bytes or digest.hexdigest() != held.sha256:
        raise _damaged(held.name)


def _damaged(name: str) -> ApiError:
    return ApiError(0, "Damaged", f"{name}: what came is not what the pod has written; try again")
