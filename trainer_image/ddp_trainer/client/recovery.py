"""Live recovery of a loop, the built-in one or a program's own: ranks join, leave and go on with the states they have.

`join` forms a group, `go_on` the next one, after a rank was lost or when a new one waits. Both end with equal states on
all ranks: those of a rank that has finished the most steps. What a step that was dropped has changed is put back first.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_trainer.client.gradients import started
from ddp_trainer.client.run import Run
from ddp_trainer.client.sharing import Sharing
from ddp_trainer.client.steps import Change
from ddp_trainer.contract import processes
from ddp_trainer.contract.environment import JobEnvironment, LivePlace
from ddp_trainer.contract.exit_codes import FencedError, Left, LossNotFinite, RollBack
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.contract.outcomes import is_peer_lost
from ddp_trainer.contract.standard_error import say
from ddp_trainer.live.costs import EVENTS, Costs, Kind, is_step_dropped
from ddp_trainer.live.deciding import Excluded
from ddp_trainer.live.membership import Membership
from ddp_trainer.live.register import views_of
from ddp_trainer.live.views import source_of_state
from ddp_trainer.logs.runlog import RunLog
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.codec import rng
from ddp_trainer.snapshots.codec.loading import load_into
from ddp_trainer.snapshots.codec.state import SHARDS, Stateful
from ddp_trainer.snapshots.values import Progress

NO_STATE = -1
SETTLE_TRIES: Final = 10
"""Process groups in a row that are lost before all ranks have the same state, until live recovery is given up."""


def membership_of(
    job: JobEnvironment, place: LivePlace, *, timeout_seconds: float, needs_replicas: bool = False
) -> Membership:
    """That of this rank, which is alone until it begins."""
    return Membership(
        views_of(job),
        node_rank=place.node_rank,
        local_rank=place.local_rank,
        host=place.host,
        least=(job.elastic_min_nodes or 1) * place.procs_per_node,
        timeout_seconds=timeout_seconds,
        pod=f"{place.host} {processes.identity(os.getppid())}",  # of torchrun's agent, which starts all of them
        procs=place.procs_per_node,
        needs_replicas=needs_replicas,
    )


class Position(Protocol):
    """Where a loop stands: it moves on once a step has changed the weights, before the ranks meet at its end."""

    @property
    def steps(self) -> int:
        """Finished optimizer steps."""
        ...

    @property
    def epoch(self) -> int: ...

    @property
    def samples(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Before:
    """What a step changes before its update, as it was after `steps` finished ones."""

    steps: int
    generators: Tensor
    buffers: list[tuple[dict[str, Tensor | None], str, Tensor | None]]
    """Where each is found, also after it was replaced, and a copy of it."""
    states: Mapping[str, Any]


@dataclass(kw_only=True)
class Recovery:
    """What a recovery changes. `states` are all that must be equal on every rank, the position among them."""

    membership: Membership
    place: LivePlace
    world: World
    attached: Run
    position: Position
    modules: Callable[[], Iterable[nn.Module]]
    """A step may change their buffers before its update."""
    regroup: Callable[[], None]
    """Called in each new process group, when the world is that of it: for what else knows it."""
    log: RunLog
    heartbeat: Heartbeat
    states: Mapping[str, Stateful]
    changing: Mapping[str, Stateful] = field(default_factory=dict)
    """Those, besides buffers, that a step may change before its update."""
    shards: Stateful | None = None
    """What each rank of a pod has of its own: the same on the ranks of one place in all pods."""
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around collectives of a view: where they fail on one rank of a pod, all ranks of it raise."""

    def __post_init__(self) -> None:
        self._sharing = Sharing(lambda work: self.membership.waited(work))
        self._has_state = False
        self._before: _Before | None = None
        self._captures = rng.Captures()
        self._modules: tuple[nn.Module, ...] = ()
        self._owners: list[dict[str, Tensor | None]] = []
        """Of the buffers of `_modules`: to look for modules in modules takes milliseconds where there are thousands."""
        self._step_ended: float | None = None
        self._awaited: Kind | None = None
        """Which recovery is over with the first step of the next group."""
        self._has_dropped = False
        """Whether that step is one that was put back."""
        self._costs = Costs()
        self._resumed_from = 0
        """The step that the ranks of this attempt have resumed from."""

    def begin_step(self, generators: Tensor | None = None) -> None:
        """Remember what a step changes before its update, in case it is dropped. Before it draws any random number;
        `generators` are those of this rank as they are now, where they are known.
        """
        self._before = _Before(
            self.position.steps,
            self._captures.capture() if generators is None else generators,
            self._buffers(),
            {name: copy.deepcopy(state.state_dict()) for name, state in self.changing.items()},
        )

    def end_step(self) -> None:
        """A step is finished by all ranks. The first of a group ends what led to it."""
        now = time.monotonic()
        if self._awaited is not None and self._step_ended is not None:
            seconds = round(now - self._step_ended, 3)
            self._costs = self._costs.after(self._awaited, seconds, has_dropped=self._has_dropped)
            self._report()
            self.log.event(EVENTS[self._awaited], step=self.position.steps, seconds=seconds, worldSize=self.world.size)
        self._step_ended, self._awaited, self._has_dropped = now, None, False

    def lost(self, error: Exception) -> None:
        """A collective has failed because another rank was lost."""
        self.membership.lost()
        self._awaited = "lost"
        self.log.event("peer_lost", step=self.position.steps, message=str(error).partition("\n")[0])

    def failed(self, error: Exception) -> None:
        """This rank fails by an error of its own: the others go on without it as soon as it needs nothing of them."""
        self.membership.stop()
        if not isinstance(error, LossNotFinite | RollBack | FencedError):  # or all fail, and each is to know why
            self.attached.await_others()
            self.membership.leave()

    def leaves_group(self) -> bool:
        """After the end of a step, or the vote between steps: whether all ranks leave their group now, since a new rank
        waits, or one leaves; `go_on` is next. Raises Left on one that leaves.
        """
        change = self.attached.change
        if change is Change.NONE:
            return False
        self.attached.record_loss()  # in which all ranks take part
        if change is Change.JOINED:
            self._awaited = "joined"
        else:
            self._left(is_own=change is Change.LEAVES)
        return True

    def _left(self, *, is_own: bool) -> None:
        """Ranks that were asked to stop leave after this step. The others handle it as a loss. Raises Left on those
        that leave (`is_own`).
        """
        self._awaited = "left"
        self.log.event("rank_left", step=self.position.steps)
        if is_own:
            self.membership.depart()
            raise Left(f"asked to stop after step {self.position.steps}; the other ranks go on")

    def join(self) -> bool:
        """Become one of the ranks. Whether their states are here now; else no rank has any, and all are to resume.

        Raises Finished where the others have come to the end meanwhile.
        """
        self.membership.is_asked_to_stop = lambda: self.attached.is_asked_to_stop
        self.membership.begin(self.place.ranks)
        return self._settle()

    def resumed(self) -> None:
        """The states of a snapshot are loaded, or training begins."""
        self._has_state, self._resumed_from = True, self.position.steps
        self._report()

    def go_on(self) -> None:
        """Form the next group, after a loss or for a new rank. Raises Excluded where the others went on without this
        one, or another rank of its pod is lost; Left where it was asked to stop, too; Finished where the others have
        come to the end.
        """
        self.membership.leave()
        self.attached.lost_group()
        self._drop_unfinished_step()
        self.attached.regroups()
        try:
            self.membership.next_view()
            self._settle()
        except Excluded as error:
            self.membership.depart()  # the others wait for it no longer
            if self.attached.is_asked_to_stop:  # as the rank was that has left, or by torchrun for one that failed
                raise Left(f"asked to stop after step {self.position.steps}; the other ranks go on") from error
            raise

    def _settle(self) -> bool:
        """In a new group: equal states on all ranks, and everything that knows the world. Again where a rank is lost
        meanwhile.
        """
        tries = 0
        while True:
            try:
                return self._try_to_settle()
            except _Lost as lost:
                tries += 1
                error = lost.__cause__
                say(f"ddp_trainer: the ranks do not have the same state yet: {error}")
            if tries == SETTLE_TRIES:
                self.membership.give_up(f"sharing the state failed {tries} times in a row: {error}")
            self.membership.next_view()

    def _try_to_settle(self) -> bool:
        try:
            with self.together():
                take_over = self._meet()
            if take_over is None:
                return False
            take_over()  # once all ranks of the pod have all that they need for it
            self._has_state = True
            self._report()
            progress = Progress(self.position.steps, self.position.epoch, self.position.samples)
            with self.together():
                self.attached.go_on(progress, resumed_from=self._resumed_from)
        except RuntimeError as error:
            if not is_peer_lost(error):
                raise
            self.membership.lost()
            raise _Lost from error
        return True

    def _meet(self) -> Callable[[], None] | None:
        """In a new group: what makes the states of this rank equal to those of the others; None where none has any."""
        self.world.move(self.membership.rank, self.membership.size)
        self.regroup()
        self.attached.join()
        own = self.position.steps if self._has_state else NO_STATE
        finished = self._of_all(own, int(self._is_in_step))
        steps = [step for step, _ in finished]
        source = source_of_state(steps)
        if steps[source] == NO_STATE:
            return None
        self._share_last_loss()
        self._has_dropped = is_step_dropped(steps, [bool(begun) for _, begun in finished])
        if min(steps) == steps[source]:
            return lambda: None
        return self._share(source, is_behind=own < steps[source], is_new=own == NO_STATE)

    def _share_last_loss(self) -> None:
        """A program may decide by it, and all ranks alike. Of the last step before a loss only some may know it, and a
        rank that joins knows none.
        """
        losses = self.log.losses
        rows = torch.zeros((self.world.size, 3), dtype=torch.float64, device="cpu")
        if losses.last_loss is not None:
            own = (1.0, losses.last_step, losses.last_loss)
            rows[self.world.rank] = torch.tensor(own, dtype=torch.float64, device="cpu")
        self.membership.waited(started(dist.all_reduce(rows, async_op=True)))
        found = [(step, loss) for is_known, step, loss in rows.tolist() if is_known]
        losses.last_loss = max(found, key=itemgetter(0))[1] if found else None

    @property
    def _is_in_step(self) -> bool:
        """Whether a step was begun that is not finished."""
        return self._before is not None and self._before.steps == self.position.steps

    def _buffers(self) -> list[tuple[dict[str, Tensor | None], str, Tensor | None]]:
        modules = tuple(self.modules())
        if modules != self._modules:
            self._modules = modules
            parts = {id(part): part for module in modules for part in module.modules()}
            self._owners = [part._buffers for part in parts.values()]
        return [
            (owner, name, None if buffer is None else buffer.clone())
            for owner in self._owners
            for name, buffer in owner.items()
        ]

    def _report(self) -> None:
        self.heartbeat.recovers_live(self.world.size, self._costs.to_json())

    def _drop_unfinished_step(self) -> None:
        if self._before is None or not self._is_in_step:
            return
        rng.restore(self._before.generators)
        with torch.no_grad():
            for owner, name, before in self._before.buffers:
                now = owner.get(name)
                if now is None or before is None or now.shape != before.shape:
                    owner[name] = None if before is None else before.clone()
                else:
                    now.copy_(before)
        for name, state in self._before.states.items():
            self.changing[name].load_state_dict(copy.deepcopy(state))

    def _share(self, source: int, *, is_behind: bool, is_new: bool) -> Callable[[], None]:
        """Send the states of rank `source` to all; what makes those that are behind take them over. One that `is_new`
        begins its generators from those of the source: not with the numbers of this one, nor with those drawn in its
        place before.
        """
        standstill = None if self._step_ended is None else time.monotonic() - self._step_ended
        recovery = {
            "costs": self._costs.to_json(),
            "awaited": self._awaited,
            "standstill": standstill,
            "resumed_from": self._resumed_from,
            "rollbacks": self.attached.rollbacks,
            "skipped": sorted(self.attached.skipped_steps),
            "phase_seconds": self.heartbeat.seconds(),
        }
        generators = rng.capture()
        facts = json.loads(self._sharing.text(json.dumps(recovery).encode(), source))
        phase_seconds = facts.pop("phase_seconds")
        own = dict(self.states)
        received = self._sharing.states(self.states, source, is_behind=is_behind)
        if self.shards is not None:
            # those of the rank's place in the pod of the source, which is ahead as a whole
            pod, replicas = source // self.place.procs_per_node, self.membership.replicas
            own[SHARDS] = self.shards
            received |= self._sharing.states({SHARDS: self.shards}, pod, is_behind=is_behind, group=replicas)
        self._sharing.tensor(generators, source)

        def take_over() -> None:
            for name, state in received.items():
                load_into(own[name], state)
            if is_behind:
                self._take_over(**facts)
            if is_new:
                self.heartbeat.goes_on_after(phase_seconds)
                rng.reseed(generators, step=self.position.steps, rank=self.world.rank, world_size=self.world.size)

        return take_over

    def _take_over(
        self,
        costs: Mapping[str, Any],
        awaited: Kind | None,
        standstill: float | None,
        resumed_from: int,
        rollbacks: int,
        skipped: Sequence[int],
    ) -> None:
        """What a rank that is ahead knows: which recovery is awaited, for how many seconds no step has ended, where the
        attempt began, and which steps are skipped.
        """
        self.attached.rolled_back(rollbacks, skipped)
        self._costs, self._awaited, self._resumed_from = Costs.from_json(costs), awaited, resumed_from
        self._step_ended = None if standstill is None else time.monotonic() - standstill

    def _of_all(self, *own: int) -> list[list[int]]:
        """The values of each rank."""
        values = torch.zeros((self.world.size, len(own)), dtype=torch.int64, device="cpu")
        values[self.world.rank] = torch.tensor(own, device="cpu")
        self.membership.waited(started(dist.all_reduce(values, async_op=True)))
        found: list[list[int]] = values.tolist()
        return found


class _Lost(Exception):
    """Another rank was lost while the ranks settled in their group."""
