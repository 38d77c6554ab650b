"""Membership views of one attempt: who takes part, and the decisions that lead from one view to the next.

Views are numbered from 0. The number is the fencing token of the ranks: a process group belongs to one view, and a step
needs every member of its view. Which proposal becomes view n + 1 is decided by the volume (`register`), where it can be
written once. So two halves of a view that lost each other may both propose, and only one of them goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import Any, Final

SILENT_SECONDS: Final = 3.0
"""How long a member may leave a question unanswered until the others go on without it. One that has ended is known at
once: its host refuses the connection."""
MINORITY_SECONDS: Final = 2.0
"""How long the smaller half of a view waits before it proposes to go on alone: the larger half is then there first."""

REPLACEMENT_SECONDS: Final = 120.0
"""How long members that are too few wait for a replacement: longer than a pod usually takes to start."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's process. `id` is new with every process; `host` and `port` are those of its listener."""

    id: str
    node_rank: int
    local_rank: int
    host: str
    port: int

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def place(self) -> tuple[int, int]:
        return self.node_rank, self.local_rank


@dataclass(frozen=True, slots=True)
class View:
    """The members of one view in the order of their ranks, and the store at which its process group meets."""

    number: int
    members: tuple[Member, ...]
    proposer: str
    """Id of the member that hosts the store."""
    store_host: str
    store_port: int

    def rank_of(self, member: str) -> int | None:
        """The rank that this member has in the view; None where it takes no part."""
        return next((rank for rank, one in enumerate(self.members) if one.id == member), None)

    def to_json(self) -> dict[str, Any]:
        return {"version": 1, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> View:
        members = tuple(Member(**member) for member in value["members"])
        fields = {name: value[name] for name in ("number", "proposer", "store_host", "store_port")}
        return cls(members=members, **fields)


@dataclass(frozen=True, slots=True)
class Answers:
    """What the coordinator of a view that is over knows of its other members, by id."""

    arrived: Collection[str] = ()
    """Have left the view and wait for the next."""
    gone: Collection[str] = ()
    """Their process has ended."""
    silent: Mapping[str, float] = field(default_factory=dict)
    """Have not answered for so many seconds."""


class Verdict(Enum):
    """What the coordinator of a view that is over does now."""

    WAIT = auto()
    PROPOSE = auto()
    TOO_FEW = auto()
    """Fewer are left than may go on; the state stays in memory until a replacement comes."""
    GIVE_UP = auto()
    """None came in time: the next attempt starts from a snapshot."""


def lost(view: View, own: str, answers: Answers) -> list[str]:
    """Ids of the other members that will not come."""
    others = (member.id for member in view.members if member.id != own)
    return [one for one in others if one in answers.gone or answers.silent.get(one, 0.0) >= SILENT_SECONDS]


def coordinator(view: View, own: str, answers: Answers) -> Member:
    """The member that this one leaves the next view to: the first that is not lost, as far as is known by now."""
    without = lost(view, own, answers)
    return next(member for member in view.members if member.id not in without)


def is_known(view: View, own: str, answers: Answers) -> bool:
    """Whether each other member has come or is lost."""
    known = {own, *answers.arrived, *lost(view, own, answers)}
    return all(member.id in known for member in view.members)


def judged(view: View, own: str, answers: Answers, *, joining: int, least: int, waited: float) -> Verdict:
    """Whether to propose the next view of `own`, the members that arrived and `joining` new ones.

    `least` is how many members must be in it, `waited` the seconds since all others are known to have come or be lost.
    """
    if not is_known(view, own, answers):
        return Verdict.WAIT
    others = [member.id for member in view.members if member.id != own]
    left = 1 + sum(one in answers.arrived for one in others)
    if left + joining < least:
        return Verdict.GIVE_UP if waited >= REPLACEMENT_SECONDS else Verdict.TOO_FEW
    # only a silent member may be going on elsewhere; one whose process has ended cannot
    elsewhere = [one for one in others if one not in answers.arrived and one not in answers.gone]
    has_first = own == view.members[0].id or view.members[0].id in answers.arrived
    is_minority = len(elsewhere) > left or (len(elsewhere) == left and not has_first)
    return Verdict.WAIT if is_minority and waited < MINORITY_SECONDS else Verdict.PROPOSE


def successors(view: View, own: str, arrived: Collection[str], joining: Sequence[Member]) -> tuple[Member, ...]:
    """The members of the next view in the order of their ranks: by place, and of two in one place the newer process."""
    stay = [member for member in view.members if member.id == own or member.id in arrived]
    by_place = {member.place: member for member in (*stay, *joining)}
    return tuple(by_place[place] for place in sorted(by_place))


def source_of_state(steps: Sequence[int]) -> int:
    """The rank whose state all others take over where theirs is of an earlier step: the first of those that are ahead.

    `steps` are the finished steps of each rank; -1 for one that has no state. Ranks of one view differ by one step at
    most, because no rank finishes a step before all have finished the one before. A rank that is ahead had the whole
    gradient, so its step stands, and the others need not compute it again.
    """
    return max(range(len(steps)), key=lambda rank: (steps[rank], -rank))
