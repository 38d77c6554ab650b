"""Whether the gang is stalled, and by which rank: this node's ranks, and those of the other nodes where these are late.

`look` is called a few times a second and never waits. The ranks of one node are judged at once, with their stacks;
those of several once their launchers have answered (`accounts`). Where the volume that they answer over is gone, each
node judges by its own ranks alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ddp_trainer.contract import processes, run_dir, unfinished
from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.exit_codes import EXIT_OK
from ddp_trainer.contract.heartbeat import read_heartbeats
from ddp_trainer.contract.outcomes import read_outcomes
from ddp_trainer.launch.accounts import Account, Accounts, Answers
from ddp_trainer.launch.activity import Activity
from ddp_trainer.launch.stacks import collective, dump_stacks, innermost_frame, save_stacks, script_stack
from ddp_trainer.launch.watchdog import ENDED, NAMED_RANKS, Limits, Rank, is_late, may_wait, ranks_of, stalled

FINAL_SECONDS: Final = 3.0
"""How long the end of an attempt waits for a verdict that other launchers are about to act on."""
ABSENT_SECONDS: Final = 60.0
"""For how long a node must have given no account to be the cause: NFS may show a new file that late."""
HUNG_SECONDS: Final = unfinished.END_SECONDS + 60.0
"""How long a rank whose script has returned may be idle: it ends by itself before that, unless Python is stuck."""
STOOD_STILL_SECONDS: Final = 5.0
"""Ten times what is between two looks of a launcher. After a longer pause the whole pod stood still."""
OVERDUE_SECONDS: Final = 3.0
"""For how long an account waits for a look that is overdue by so much: one comes at once where the pod goes on."""
MOST_PAUSES: Final = 3
"""Of the last so many the time does not count as silence. Where a pod stands still again and again, it does count."""
STACK_BYTES: Final = 16 << 10
"""Of a rank's stacks in an account; the innermost frames come first."""
LONGEST_PAUSE_SECONDS: Final = 15.0
"""Between two questions while a rank is within its allowance and others wait for it."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The stall of the gang: `rank` is the one that is named, `here` whether it is of this node."""

    rank: int
    message: str
    here: bool
    stack: str = ""
    """Of that rank, as its node has given it."""
    has_frames: bool = True
    """Whether `message` says where the ranks stood."""
    file: str | None = None
    """The name of the file that has the stacks of all nodes; None where none was saved."""


class GangWatch:
    """Of one attempt. `close` it at the end."""

    def __init__(self, pod: PodEnvironment) -> None:
        self._pod = pod
        self._limits = Limits(pod.stall_min_seconds, pod.stall_max_seconds)
        self._activity = Activity(self._limits.max_seconds)
        self._ranks: Sequence[Rank] = ()
        self._stacks: tuple[float, dict[int, str]] = (-1e9, {})
        self._next_question = 0.0
        self._stopped_at: dict[int, float] = {}
        """By pid, since when each look has found the process stopped by a signal."""
        self._seen_at = time.monotonic()
        """When the launcher last looked."""
        self._pauses: tuple[tuple[float, float], ...] = ()
        """When the pod went on after it had stood still, and for how long it had, the last times."""
        self._missing_since: dict[int, float] = {}
        """The nodes that did not answer the last questions, and since when; as long as a rank of this node is late."""
        self._accounts = Accounts(pod, self._account) if pod.nodes > 1 else None

    def stood_still(self, now: float) -> bool:
        """Whether the whole pod did until now, as on a paused node: silence before says nothing about its ranks. To be
        asked again and again.
        """
        stood = now - self._seen_at
        if stood > STOOD_STILL_SECONDS:
            self._pauses = (*self._pauses, (now, stood))[-MOST_PAUSES:]
        self._seen_at = now
        return stood > STOOD_STILL_SECONDS

    def look(self, now: float, *, may_ask: bool) -> Stall | None:
        """The stall, if there is one; `now` is monotonic seconds. Without `may_ask` only one that others have found."""
        self._ranks = self._own_ranks(now)
        if self._accounts is None:
            return self._judged_alone(now) if may_ask and self._is_late(now) else None
        if self._accounts.verdict is not None:
            return self._agreed(self._accounts.verdict)
        answers, late = self._accounts.answers(), self._is_late(now)
        if not late:
            self._missing_since.clear()
        if answers is not None and not answers.accounts and may_ask and late:
            return self._judged_alone(now)  # the volume hangs
        if answers is not None and may_ask:
            return self._judge(answers, now)
        if may_ask and not self._accounts.is_asking and now >= self._next_question and late:
            self._accounts.ask()
        return None

    def hung_at_the_end(self, now: float) -> list[Rank]:
        """Ranks of this node, at the last look, whose script has returned, and whose process neither ends nor works."""
        return [rank for rank in self._ranks if rank.phase == ENDED and now - rank.progress_at > HUNG_SECONDS]

    def final(self) -> Stall | None:
        """At the end of an attempt that failed: the stall that other launchers have found meanwhile."""
        if self._accounts is None or self._pod.live:
            return None
        verdict = self._accounts.verdict or self._accounts.final(FINAL_SECONDS)
        return None if verdict is None else self._agreed(verdict)

    def save_stacks(self, stall: Stall) -> Stall:
        """Take the stacks of this node's ranks before they are killed, those of stopped ones too; the stall with what
        they show. Of ranks that are gone already it keeps what was sent to the other nodes.
        """
        living = _with_stacks(self._pod.run_dir)
        by_local = dump_stacks(self._pod.run_dir, {entry["localRank"]: entry["pid"] for entry in living})
        _, texts = self._stacks
        texts = texts | {entry["rank"]: text for entry in living if (text := by_local[entry["localRank"]])}
        name = f"stacks-attempt-{self._pod.attempt}-node-{self._pod.node_rank}.txt"
        path = save_stacks(texts, stall.message, [self._pod.log_dir, self._pod.run_dir], name)
        message = stall.message
        if not stall.has_frames:
            message = f"{message}. {_frames({rank: innermost_frame(text) for rank, text in texts.items()}, stall.rank)}"
        stack = script_stack(texts.get(stall.rank, "")) or stall.stack
        if stack:
            message += f". Stack of rank {stall.rank}: {stack}"
        where = path if stall.file is None else self._pod.log_dir / stall.file
        return replace(stall, message=f"{message}. Stacks: {where or 'could not be saved'}")

    def close(self) -> None:
        if self._accounts is not None:
            self._accounts.close()

    def _is_late(self, now: float) -> bool:
        return any(is_late(rank, now, self._limits) for rank in self._ranks)

    def _own_ranks(self, now: float, *, again: bool = False) -> list[Rank]:
        living = {entry["pid"]: entry for entry in _living(self._pod.run_dir)}
        heartbeats = [beat for beat in read_heartbeats(self._pod.run_dir) if beat["pid"] in living]
        states = {pid: processes.state(pid) for pid in living}
        self._stopped_at = {pid: self._stopped_at.get(pid, now) for pid, state in states.items() if state == "T"}
        active_at, ended = self._activity.by_pid(living, now, again=again), _ended(self._pod.run_dir)
        return ranks_of(heartbeats, states, active_at, self._pod.node_rank, ended, self._stopped_at)

    def _judged_alone(self, now: float) -> Stall | None:
        if now < self._next_question:
            return None
        ranks, stacks = self._own_ranks(now, again=True), self._take_stacks()
        found = stalled([_with_stack(rank, stacks.get(rank.rank, "")) for rank in ranks], now, self._limits)
        if found is None:
            self._next_question = now + self._pause
            return None
        return Stall(found.rank, found.message, here=True, has_frames=False)

    def _judge(self, answers: Answers, now: float) -> Stall | None:
        """Publish the verdict, if there is one. Ranks that recover live go on without a rank that stands still: its
        node alone ends its ranks.
        """
        assert self._accounts is not None
        self._next_question = now + self._pause
        verdict = self._verdict(answers, now)
        if verdict is None:
            return None
        if self._pod.live:
            stall = self._agreed(verdict)
            return stall if stall.here else None
        self._accounts.publish(lambda: {**verdict, "file": self._save_all(answers, verdict["message"])})
        return None

    def _verdict(self, answers: Answers, now: float) -> dict[str, Any] | None:
        ranks = [rank for account in answers.accounts for rank in ranks_in(account, now)]
        found = stalled(ranks, now, self._limits)
        waiting = found is None or all(may_wait(rank) for rank in ranks if is_late(rank, now, self._limits))
        self._missing_since = {node: self._missing_since.get(node, now) for node in answers.missing}
        absent = [node for node, since in self._missing_since.items() if now - since >= ABSENT_SECONDS]
        if absent and waiting and self._is_late(now):
            return _absent(absent, ranks)
        if found is None or (answers.missing and waiting):
            return None
        return {
            "version": 1,
            "rank": found.rank,
            "nodeRank": found.node,
            "message": f"{found.message}. {_frames({rank.rank: rank.frame for rank in ranks}, found.rank)}",
            "stack": _stack_of(answers.accounts, found.rank) or "",
        }

    def _save_all(self, answers: Answers, title: str) -> str | None:
        """The stacks of all nodes in one file; on the thread of `accounts`, which may wait for the volume. Its name, or
        None where the volume did not take it.
        """
        ranks = [one for account in answers.accounts for one in account["ranks"]]
        texts = {one["rank"]: one.get("stack", "") for one in ranks}
        path = save_stacks(texts, title, [self._pod.log_dir], f"stacks-attempt-{self._pod.attempt}.txt")
        return None if path is None else path.name

    def _agreed(self, verdict: Mapping[str, Any]) -> Stall:
        here = verdict["nodeRank"] == self._pod.node_rank and verdict["rank"] >= 0
        return Stall(verdict["rank"], verdict["message"], here, verdict["stack"], file=verdict.get("file"))

    @property
    def _pause(self) -> float:
        """Between two questions: longer than what the stacks disturb of the ranks' activity."""
        return min(LONGEST_PAUSE_SECONDS, 3 * self._activity.look_seconds)

    def _account(self) -> Account:
        """For the other launchers; on the thread of `accounts`.

        A rank that has waited, and goes on now, is no longer late: by the last look it would be, with a stack that
        waits for nobody. Nor is one whose pod stood still until now: that time does not count.
        """
        self._await_look()
        now = time.monotonic()
        ranks, stacks = self._own_ranks(now, again=True), self._take_stacks()
        ranks = [replace(rank, progress_at=min(now, rank.progress_at + self._stood(rank))) for rank in ranks]
        own = [_described(rank, stacks.get(rank.rank, ""), now) for rank in ranks]
        ended = [
            {"rank": rank, "phase": ENDED, "step": _step(self._pod.run_dir, rank)}
            for rank in _ended(self._pod.run_dir).values()
        ]
        return {"ranks": own + [one for one in ended if one["rank"] not in {rank.rank for rank in ranks}]}

    def _stood(self, rank: Rank) -> float:
        """For how many seconds the pod stood still after the last progress of a rank."""
        return sum(seconds for went_on_at, seconds in self._pauses if went_on_at > rank.progress_at)

    def _await_look(self) -> None:
        """Where the pod stood still, this thread may be the first to go on, and the launcher's look tells."""
        until = time.monotonic() + OVERDUE_SECONDS
        while time.monotonic() - self._seen_at > STOOD_STILL_SECONDS and time.monotonic() < until:
            time.sleep(0.05)

    def _take_stacks(self) -> dict[int, str]:
        """By rank. Taken anew only after a pause: writing them is activity of the rank."""
        taken_at, stacks = self._stacks
        if time.monotonic() - taken_at < self._pause / 2:
            return stacks
        living = _with_stacks(self._pod.run_dir)
        with self._activity.disregarded():
            by_local = dump_stacks(
                self._pod.run_dir, {entry["localRank"]: entry["pid"] for entry in living}, go_on=False
            )
        stacks = {entry["rank"]: by_local.get(entry["localRank"], "") for entry in living}
        self._stacks = time.monotonic(), stacks
        return stacks


def ranks_in(account: Account, now: float) -> list[Rank]:
    """The ranks of an account, their silence counted back from `now`."""
    return [
        Rank(
            rank=one["rank"],
            phase=one["phase"],
            step=one["step"],
            progress_at=now - one.get("silentSeconds", 0.0),
            step_seconds_p99=one.get("stepSecondsP99"),
            process_state=one.get("state"),
            stopped_at=None if one.get("stoppedSeconds") is None else now - one["stoppedSeconds"],
            observed=bool(one.get("observed")),
            frame=innermost_frame(one.get("stack", "")),
            collective=collective(one.get("stack", "")),
            node=account["nodeRank"],
        )
        for one in account["ranks"]
    ]


def _described(rank: Rank, stack: str, at: float) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "phase": rank.phase,
        "step": rank.step,
        "silentSeconds": round(at - rank.progress_at, 3),
        "stepSecondsP99": rank.step_seconds_p99,
        "state": rank.process_state,
        "stoppedSeconds": None if rank.stopped_at is None else round(at - rank.stopped_at, 3),
        "observed": rank.observed,
        "stack": stack[:STACK_BYTES],
    }


def _with_stack(rank: Rank, stack: str) -> Rank:
    return replace(rank, frame=innermost_frame(stack), collective=collective(stack))


def _absent(absent: Sequence[int], ranks: Sequence[Rank]) -> dict[str, Any]:
    """No rank that is known holds up the others: the cause is on a node that does not answer."""
    more = f" and {len(absent) - NAMED_RANKS} more" if len(absent) > NAMED_RANKS else ""
    nodes = ", ".join(map(str, absent[:NAMED_RANKS])) + more
    frames = _frames({rank.rank: rank.frame for rank in ranks}, -1)
    text = (
        f"all ranks that are known wait for others, and the launcher of node rank {nodes} gives no account: its node, "
        f"its network or its volume is gone, or its ranks have ended. {frames}"
    )
    return {"version": 1, "rank": -1, "nodeRank": absent[0], "message": text, "stack": ""}


def _stack_of(accounts: Sequence[Account], rank: int) -> str | None:
    texts = (one.get("stack", "") for account in accounts for one in account["ranks"] if one["rank"] == rank)
    return script_stack(next(texts, ""))


def _frames(frames: Mapping[int, str | None], named: int) -> str:
    shown = sorted(sorted(frames, key=lambda rank: (rank != named, rank))[:NAMED_RANKS])
    return "; ".join(f"rank {rank} stood in {frames[rank] or 'an unknown place (no stack)'}" for rank in shown)


def _living(directory: Path) -> list[dict[str, int]]:
    return [entry for entry in run_dir.registrations(directory) if processes.alive(entry["pid"])]


def _with_stacks(directory: Path) -> list[dict[str, int]]:
    """The living ranks that write their stacks when asked. One that has replaced its program would die of the signal:
    exec(2) takes its handler away.
    """
    return [entry for entry in _living(directory) if not entry.get("replaced")]


def _ended(directory: Path) -> dict[int, int]:
    """The ranks whose script has returned, by the pid of their process."""
    pids = {entry["rank"]: entry["pid"] for entry in run_dir.registrations(directory)}
    return {
        outcome["pid"]: outcome["rank"]
        for outcome in read_outcomes(directory)
        if outcome["exitCode"] == EXIT_OK and pids.get(outcome["rank"]) == outcome["pid"]
    }


def _step(directory: Path, rank: int) -> int | None:
    return next((beat["step"] for beat in read_heartbeats(directory) if beat["rank"] == rank), None)
