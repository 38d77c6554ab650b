"""Print what the ranks of a job printed, from the copies on the volume, by time, each line with its rank.

python -m ddp_trainer.logs.pods /mnt/shared digits                 of the newest attempt
python -m ddp_trainer.logs.pods /mnt/shared digits --attempt 2 --rank 7 --grep loss --tail 20 --since 600

Exit codes: 0 printed, also if no line matches, 2 there is no such log. It needs no torch.
"""

from __future__ import annotations

import argparse
import heapq
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ddp_trainer.contract.pod_logs import FOLDER, STAMP, STARTS, place_of, stamp
from ddp_trainer.contract.processes import allow_files

_LOCAL_RANK: Final = re.compile(r"\[local rank (\d{1,7})\] ")
_MOST_NAMED: Final = 10


class NoLogs(Exception):
    """There is no such log. The message says what there is."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which lines are wanted; None means all, for `attempt` those of the newest."""

    attempt: int | None = None
    node: int | None = None
    rank: int | None = None
    pattern: re.Pattern[str] | None = None
    tail: int | None = None
    """The last so many of the wanted lines of each pod."""
    since: str = ""
    """No line with an earlier time; as `contract.pod_logs.stamp` writes it."""


class Line(NamedTuple):
    """A line of a rank."""

    time: str
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class _Run:
    """The newest run of the name in a file."""

    start: int = 0
    """Where its lines begin."""
    ranks: int = 1
    """How many its pod has."""
    uid: bytes | None = None
    """Of the job: empty where the header has none, as one of an older `ddpjob run`; None without a header."""

    def is_of_job(self, other: _Run) -> bool:
        return None in (self.uid, other.uid) or self.uid == other.uid


def roots_of(shared: Path, job: str) -> list[Path]:
    """The folders that have logs of the job, that with the newest log first. On a claim that several jobs use, a job
    sees its own folder as the volume.

    Raises:
        NoLogs: the volume has none of the job.
    """
    roots = [root for root in (shared, shared / "jobs" / job) if _files(root, job)]
    if not roots:
        have = sorted({path.parent.parent.name for path in shared.glob(f"logs/*/{FOLDER}/*.log")})
        there = f"it has those of {_some(have)}" if have else "it has none of any job"
        raise NoLogs(f"the volume has no logs of pods of {job}; {there}")
    return sorted(roots, key=lambda root: max(map(_age, _files(root, job))), reverse=True)


def read_lines(root: Path, job: str, wanted: Wanted) -> Iterator[Line]:
    """The wanted lines of a job that has logs below `root`, by time.

    Raises:
        NoLogs: there are none of the attempt or the node.
    """
    files = _files(root, job)
    attempts = sorted({attempt for attempt, _, _ in files})
    # an earlier run of the name may have had more attempts
    newest, _, _ = max(files, key=_age)
    attempt = newest if wanted.attempt is None else wanted.attempt
    if attempt not in attempts:
        raise NoLogs(f"the volume has no logs of attempt {attempt} of {job}; it has those of {_some(attempts)}")
    of_attempt = [file for file in files if file[0] == attempt]
    # or more nodes
    last = _newest_run(max(of_attempt, key=_age)[2])
    runs = [
        (node, path, run)
        for _, node, path in sorted(of_attempt)
        if wanted.node in (None, node) and (run := _newest_run(path)).is_of_job(last)
    ]
    if not runs:
        there = _some([node for _, node, path in sorted(of_attempt) if _newest_run(path).is_of_job(last)])
        raise NoLogs(f"the volume has no log of node rank {wanted.node} of {job}, attempt {attempt}; it has {there}")
    return heapq.merge(*(_last(_of_pod(path, node, run, wanted), wanted.tail) for node, path, run in runs))


def _age(file: tuple[int, int, Path]) -> tuple[float, int]:
    """Greatest for the newest."""
    attempt, _, path = file
    return path.stat().st_mtime, attempt


def _files(root: Path, job: str) -> list[tuple[int, int, Path]]:
    """Attempt, node rank and path."""
    files = ((place_of(path), path) for path in (root / "logs" / job / FOLDER).glob("*.log"))
    return [(*place, path) for place, path in files if place is not None]


def _some(items: Sequence[object]) -> str:
    more = f" and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
    return f"{', '.join(map(str, items[:_MOST_NAMED]))}{more}"


def _of_pod(path: Path, node: int, run: _Run, wanted: Wanted) -> Iterator[Line]:
    """The wanted lines of the newest run of the name; those of earlier ones are before its header."""
    with path.open("rb") as file:
        file.seek(run.start)
        for raw in file:
            line = _parsed(raw.decode(errors="replace").rstrip("\r\n"), node, run.ranks)
            if (
                line.time >= wanted.since
                and wanted.rank in (None, line.rank)
                and (wanted.pattern is None or wanted.pattern.search(line.text))
            ):
                yield line


def _newest_run(path: Path) -> _Run:
    run, position = _Run(), 0
    with path.open("rb") as file:
        for raw in file:
            position += len(raw)
            if raw.startswith(b"---- ") and (found := STARTS.fullmatch(raw)):
                uid = found["uid"] if found["ranks"] else found["run"]
                run = _Run(position, int(found["ranks"] or found["ranks_of_run"] or 1), uid or b"")
    return run


def _parsed(text: str, node: int, ranks: int) -> Line:
    """Lines of the first rank of a node have no prefix."""
    when, _, rest = text.partition(" ")
    if STAMP.fullmatch(when) is None:
        when, rest = "", text
    found = _LOCAL_RANK.match(rest)
    return Line(when, node * ranks + (int(found[1]) if found else 0), rest[found.end() :] if found else rest)


def _last(lines: Iterator[Line], tail: int | None) -> Iterable[Line]:
    return lines if tail is None else deque(lines, maxlen=min(tail, sys.maxsize))


def main(argv: Sequence[str] | None = None) -> int:
    """Print them; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_trainer.logs.pods",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shared", type=Path, metavar="DIR", help="the volume, such as /mnt/shared")
    parser.add_argument("job", metavar="NAME", help="name of the job")
    parser.add_argument("--attempt", type=int, metavar="N", help="of this attempt instead of the newest")
    parser.add_argument("--node", type=int, metavar="N", help="only the ranks of this node rank")
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank")
    parser.add_argument("--grep", type=re.compile, metavar="REGEX", help="only lines that match")
    parser.add_argument("--tail", type=int, metavar="N", help="only the last so many of these lines of each pod")
    parser.add_argument("--since", type=float, metavar="SECONDS", help="only lines that are not older")
    given = parser.parse_args(argv)
    allow_files()  # the logs of all pods are read at the same time
    since = "" if given.since is None else stamp(time.time() - given.since)
    wanted = Wanted(given.attempt, given.node, given.rank, given.grep, given.tail, since)
    try:
        root, *older = roots_of(given.shared, given.job)
        if older:
            said = f"{older[0]} has older ones, of an earlier job of the name"
            print(f"note: these are the logs in {root}; {said}", file=sys.stderr, flush=True)
        for line in read_lines(root, given.job, wanted):
            print(f"[rank {line.rank}] {line.text}")
        sys.stdout.flush()
    except NoLogs as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # a reader such as `head` has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
