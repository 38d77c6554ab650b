"""Membership views of one attempt: who takes part, and the decisions that lead from one view to the next.

Views are numbered from 0. The number is the fencing token of the ranks: a process group belongs to one view, and a step
needs every member of its view. Which proposal becomes view n + 1 is decided by the volume (`register`), where it can be
written once. So two halves of a view that lost each other may both propose, and only one of them goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from itertools import chain
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
    """One rank's process. `id` is new with every process; `host` and `port` are those of its listener; `pod` is what
    all ranks of one pod have in common, and no others.
    """

    id: str
    node_rank: int
    local_rank: int
    host: str
    port: int
    pod: str = ""

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
    """Ids of the other members that will not come. One that has arrived was silent before, and is not asked again."""
    others = (member.id for member in view.members if member.id != own)
    silent = {one for one, seconds in answers.silent.items() if seconds >= SILENT_SECONDS}.difference(answers.arrived)
    return [one for one in others if one in answers.gone or one in silent]


def coordinator(view: View, own: str, answers: Answers) -> Member:
    """The member that this one leaves the next view to: the first that is not lost, as far as is known by now."""
    without = lost(view, own, answers)
    return next(member for member in view.members if member.id not in without)


def whole_pods(members: Iterable[Member], procs: int) -> dict[tuple[int, str], list[Member]]:
    """The members by pods, those of pods that have all of their `procs` ranks, in the order in which they became whole:
    a pod goes on, and joins, as a whole.
    """
    pods: dict[tuple[int, str], dict[int, Member]] = {}
    whole: dict[tuple[int, str], list[Member]] = {}
    for member in members:
        key = member.node_rank, member.pod
        pods.setdefault(key, {})[member.local_rank] = member
        if len(pods[key]) == procs:
            whole[key] = list(pods[key].values())
    return whole


def mates(view: View, own: Member) -> list[Member]:
    """The other ranks of this one's pod."""
    return [one for one in view.members if (one.node_rank, one.pod) == (own.node_rank, own.pod) and one.id != own.id]


def is_known(view: View, own: str, answers: Answers) -> bool:
    """Whether each other member has come or is lost."""
    known = {own, *answers.arrived, *lost(view, own, answers)}
    return all(member.id in known for member in view.members)


def judged(
    view: View, own: str, answers: Answers, *, joining: Sequence[Member], least: int, waited: float, procs: int = 1
) -> Verdict:
    """Whether to propose the next view of `own`, the members that arrived and the new ones that are `joining`.

    `least` is how many members must be in it, `waited` the seconds since all others are known to have come or be lost,
    `procs` how many ranks a pod has.
    """
    if not is_known(view, own, answers):
        return Verdict.WAIT

    def size(members: Iterable[Member]) -> int:
        return procs * len(whole_pods(members, procs))

    here = {own, *answers.arrived}
    left = size(member for member in view.members if member.id in here)
    if len(successors(view, own, answers.arrived, joining, procs)) < least:
        return Verdict.GIVE_UP if waited >= REPLACEMENT_SECONDS else Verdict.TOO_FEW
    # only a silent member may be going on elsewhere; one whose process has ended cannot
    elsewhere = size(one for one in view.members if one.id not in here and one.id not in answers.gone)
    has_first = view.members[0].id in here
    is_minority = elsewhere > left or (elsewhere == left and not has_first)
    return Verdict.WAIT if is_minority and waited < MINORITY_SECONDS else Verdict.PROPOSE


def successors(
    view: View, own: str, arrived: Collection[str], joining: Sequence[Member], procs: int = 1
) -> tuple[Member, ...]:
    """The members of the next view in the order of their ranks: by place, whole pods of `procs` ranks only, and of two
    pods in one place the newer one.
    """
    stay = [member for member in view.members if member.id == own or member.id in arrived]
    pods = {**whole_pods(stay, procs), **whole_pods(joining, procs)}
    by_node = {node_rank: members for (node_rank, _), members in pods.items()}
    return tuple(sorted(chain.from_iterable(by_node.values()), key=lambda member: member.place))


def source_of_state(steps: Sequence[int]) -> int:
    """The rank whose state all others take over where theirs is of an earlier step: the first of those that are ahead.

    `steps` are the finished steps of each rank; -1 for one that has no state. Ranks of one view differ by one step at
    most, because no rank finishes a step before all have finished the one before. A rank that is ahead had the whole
    gradient, so its step stands, and the others need not compute it again.
    """
    return max(range(len(steps)), key=lambda rank: (steps[rank], -rank))
