"""Leader election with Leases: of several replicas one acts, the others keep their picture of the cluster warm.

Like client-go's leaderelection: a holder renews its Lease; another takes it when it has not seen it change for the
whole of its duration *on its own monotonic clock*, so no two machines need agree on the time. A holder that could not
renew stops writing well before that (`fence`), also when it was stopped and wakes up later. The Lease is given back
at the end, so that a rolling update costs a second.

Leadership is an epoch: it ends when the fence closes, even if the Lease is renewed a moment later, because another
replica may have led in between. Each new epoch calls `elected`, and what was decided in an earlier one is not written.

A leader holds all of its Leases. There is one, or two where namespaces are divided into shards: that of the shard,
which one replica holds, and before it that of the operator, which the replicas of all shards hold together under one
identity. So a shard never acts beside an operator that divides the namespaces in another way.

Takeover: at most LEASE + 2 x STANDBY_POLL = 14 s after a crash, STANDBY_POLL = 1 s after a graceful end, plus the
calls themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ddpjob_operator import metrics
from ddpjob_operator.runtime import paths
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError

logger = logging.getLogger(__name__)

LEASE_SECONDS = 12
RENEW_SECONDS = 2.0
RETRY_SECONDS = 0.25
FENCE_SECONDS = 8.0
STANDBY_POLL_SECONDS = 1.0

LONGEST_CALL_SECONDS = FENCE_SECONDS / 2
"""Of one who does not lead, or leads no more."""
LEAST_TRY_SECONDS = 1.0
"""A renewal may take half of the time that is left until the fence closes, but no less than this: three of them fit."""

_epoch_of_pass: ContextVar[int | None] = ContextVar("epoch of the pass", default=None)


class NotLeading(ApiError):
    """This replica may not change anything (any more)."""


@dataclass(eq=False)
class Leader:
    """Runs for `leases`, one after the other: the next one only while those before it are held."""

    leases: tuple[Lease, ...]
    known: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is known who leads."""
    _led: int | None = None
    """The epoch for which `elected` was called last, unless `deposed` was since."""

    @property
    def leading(self) -> bool:
        """Whether this replica holds its Leases and may write at this moment."""
        return self._holds_all and self._led == self.epoch

    @property
    def _holds_all(self) -> bool:
        return all(lease.held for lease in self.leases)

    @property
    def epoch(self) -> int:
        """How often leadership has begun, or more: it grows with each beginning."""
        return sum(lease.epoch for lease in self.leases)

    def begin_pass(self) -> None:
        """What the running task, and those that it starts, write from now on was decided in this epoch."""
        _epoch_of_pass.set(self.epoch)

    def fence(self) -> None:
        """Raises:
        NotLeading: a Lease is not ours, or could not be renewed in time, or this was decided in an earlier epoch.
        """
        for lease in self.leases:
            if not lease.held:
                raise NotLeading(0, "NotLeading", f"{lease.identity} does not hold the lease {lease}")
        if self._led != self.epoch or _epoch_of_pass.get() not in (None, self.epoch):
            raise NotLeading(0, "NotLeading", f"the lease {self.leases[-1]} was lost since this was decided")

    async def run(self, elected: Callable[[], None], deposed: Callable[[], None]) -> None:
        """Take part until cancelled. Calls `elected` at the beginning of each epoch, `deposed` when a Lease is lost or
        in doubt."""
        while True:
            began, pause = _now(), RETRY_SECONDS
            if await self._run_for_all():
                pause = max(RETRY_SECONDS, began + RENEW_SECONDS - _now())
            if self._holds_all and self._led != self.epoch:
                self._led = self.epoch
                logger.info("leading as %s, epoch %d", self.leases[-1].identity, self.epoch)
                elected()
            elif self._led is not None and not self._holds_all:
                self._led = None
                for lease in self.leases:
                    lease.give_up()
                logger.warning("no longer leading")
                deposed()
            leads = self.leading
            metrics.LEADER.set(leads)
            await asyncio.sleep(pause if leads else STANDBY_POLL_SECONDS)

    async def _run_for_all(self) -> bool:
        """Renew, take or look at the Leases; whether all answered.

        What can be is done side by side: two slow answers take no longer than one.
        """
        if self._holds_all:
            answered = await _side_by_side(lease.run_for(lease.longest_renewal()) for lease in self.leases)
        else:
            answered = await _side_by_side(lease.run_for() if lease.held else lease.observe() for lease in self.leases)
            for place, lease in enumerate(self.leases):
                before = self.leases[:place]
                if answered and not lease.held and lease.free and all(one.held for one in before):
                    answered = await _side_by_side(one.run_for() for one in (*before, lease))
        if answered:
            self.known.set()
        return answered

    async def release(self) -> None:
        """Give the Lease back, if it is ours, so that another replica need not wait until it expires. One that is
        shared is left to those who share it."""
        for lease in self.leases[:-1]:
            lease.give_up()
        metrics.LEADER.set(0)
        await self.leases[-1].release()


@dataclass(eq=False)
class Lease:
    """The Lease `namespace/name`, and whether `identity` holds it.

    Its client must not be fenced.
    """

    client: Client
    namespace: str
    name: str
    identity: str
    shared: bool = False
    """Whether other replicas renew it under this identity too."""
    epoch: int = 0
    """How often holding it has begun."""
    _held_until: float | None = None
    _seen: Json | None = None
    _seen_at: float = 0.0

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def held(self) -> bool:
        """Whether it is ours at this moment."""
        return self._held_until is not None and _now() < self._held_until

    def give_up(self) -> None:
        """Count it as not held, whatever the server says."""
        self._held_until = None

    @property
    def free(self) -> bool:
        """Whether it may be taken, as it was last seen."""
        if self._seen is None:
            return True
        spec = self._seen["spec"]
        holder, duration = spec.get("holderIdentity") or "", spec.get("leaseDurationSeconds") or LEASE_SECONDS
        return holder in ("", self.identity) or _now() - self._seen_at >= duration

    def longest_renewal(self) -> float:
        """Seconds that a renewal by the leader may take."""
        left = 0.0 if self._held_until is None else self._held_until - _now()
        return max(LEAST_TRY_SECONDS, left / 2)

    async def release(self) -> None:
        """Give it back, if it is ours."""
        self._held_until = None
        try:
            async with asyncio.timeout(LONGEST_CALL_SECONDS):  # the pod is given only so long to end
                await self._give_back()
        except (ApiError, TimeoutError) as error:
            logger.warning("could not give the lease %s back: %s", self, error or "no answer")

    async def _give_back(self) -> None:
        """As the server has it: a renewal that was cancelled may have taken effect, or may yet."""
        while (lease := await self._read()) is not None and lease["spec"].get("holderIdentity") == self.identity:
            try:
                await self._write(lease, holder="", duration=1)
            except ApiError as error:
                if not error.conflict:
                    raise
            else:
                logger.info("gave the lease %s back", self)
                return

    async def observe(self) -> bool:
        """See whether it changes; its holder's time runs from then on. Whether the server answered in time."""
        return await self._answers(self._observe(), LONGEST_CALL_SECONDS)

    async def run_for(self, seconds: float = LONGEST_CALL_SECONDS) -> bool:
        """Renew it, or take it if it was free when last seen. Whether the server answered within so many seconds."""
        return await self._answers(self._renew_or_take(), seconds)

    async def _answers(self, call: Coroutine[None, None, None], seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await call
        except (ApiError, TimeoutError) as error:
            logger.warning("lease %s: %s", self, error or "no answer")
            return False
        return True

    async def _observe(self) -> None:
        lease = await self._read()
        if lease is None:
            self._seen = None
        else:
            self._look(lease)
        # taken while this process stood still: `release` would give back the Lease of another
        if lease is None or lease["spec"].get("holderIdentity") != self.identity:
            self._held_until = None

    async def _renew_or_take(self) -> None:
        began = _now()  # of the write: a slow read before it takes no time away from the fence
        if self.shared and await self._renew_shared():
            self._hold(began + FENCE_SECONDS)
            return
        lease = self._seen
        if lease is None:
            lease = await self._create()
        elif self.free:
            lease = await self._take(lease)
        if lease is not None:
            self._look(lease)
        if lease is not None and lease["spec"].get("holderIdentity") == self.identity:
            self._hold(began + FENCE_SECONDS)
        else:
            self._held_until = None

    async def _renew_shared(self) -> bool:
        """Renew it, whichever replica of ours renewed it last; the server refuses if it is not ours. Whether it was."""
        if self._seen is None or self._seen["spec"].get("holderIdentity") != self.identity:
            return False
        ours = {"op": "test", "path": "/spec/holderIdentity", "value": self.identity}
        now = {"op": "replace", "path": "/spec/renewTime", "value": _stamp()}
        try:
            lease = await self.client.json_patch(f"{paths.leases(self.namespace)}/{self.name}", "leases", (ours, now))
        except ApiError as error:
            if error.status not in (404, 422):
                raise
            return False
        self._look(lease)
        return True

    def _hold(self, until: float) -> None:
        """It is ours. Another epoch begins unless the fence has been open since the last renewal."""
        held, self._held_until = self.held, until
        if self.held and not held:
            self.epoch += 1

    def _look(self, lease: Json) -> None:
        """Remember the Lease, and when it was first seen like this."""
        if self._seen is None or self._seen["metadata"]["resourceVersion"] != lease["metadata"]["resourceVersion"]:
            self._seen_at = _now()
        self._seen = lease

    async def _read(self) -> Json | None:
        try:
            return await self.client.get(f"{paths.leases(self.namespace)}/{self.name}", "leases")
        except ApiError as error:
            if error.not_found:
                return None
            raise

    async def _create(self) -> Json | None:
        now = _stamp()
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": self._spec(self.identity, LEASE_SECONDS) | {"acquireTime": now, "leaseTransitions": 0},
        }
        try:
            return await self.client.create(paths.leases(self.namespace), "leases", body)
        except ApiError as error:
            if error.already_exists:
                return None
            raise

    async def _take(self, lease: Json) -> Json | None:
        """Renew our own Lease, or take one over.

        Returns:
            the Lease as it is then, which another replica may hold; None if it is gone.
        """
        try:
            return await self._write(lease, self.identity, LEASE_SECONDS)
        except ApiError as error:
            if error.not_found:
                return None
            if not error.conflict:
                raise
        found = await self._read()
        if found is None or found["spec"].get("holderIdentity") != self.identity:
            return found
        if self.shared:  # another of ours has taken it meanwhile
            self._look(found)
            return self._seen if await self._renew_shared() else None
        # an earlier renewal whose answer was lost has taken effect, but it may have been long ago
        return await self._write(found, self.identity, LEASE_SECONDS)

    async def _write(self, lease: Json, holder: str, duration: int) -> Json:
        spec = self._spec(holder, duration)
        if lease["spec"].get("holderIdentity") != holder:
            spec |= {"acquireTime": _stamp(), "leaseTransitions": (lease["spec"].get("leaseTransitions") or 0) + 1}
        body = {"metadata": {"resourceVersion": lease["metadata"]["resourceVersion"]}, "spec": spec}
        return await self.client.merge_patch(f"{paths.leases(self.namespace)}/{self.name}", "leases", body)

    @staticmethod
    def _spec(holder: str, duration: int) -> Json:
        return {"holderIdentity": holder, "leaseDurationSeconds": duration, "renewTime": _stamp()}


async def _side_by_side(calls: Iterable[Awaitable[bool]]) -> bool:
    return all(await asyncio.gather(*calls))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _stamp() -> str:
    """A metav1.MicroTime, for people: the election itself reads no wall clock."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
