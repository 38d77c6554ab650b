"""Decisions on membership, and a model of ranks, a volume and everything that can go wrong between them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from ddp_trainer.client.batches import BatchPlan, micro_batches
from ddp_trainer.live.views import (
    MINORITY_SECONDS,
    REPLACEMENT_SECONDS,
    SILENT_SECONDS,
    Answers,
    Member,
    Verdict,
    View,
    judged,
    lost,
    mates,
    source_of_state,
    successors,
    whole_pods,
)
from ddp_trainer.train.data import Cursor


def member(place: int, number: int = 0, procs: int = 1) -> Member:
    """Process `number` in a place of pods of `procs` ranks: all ranks of a pod have one number."""
    node_rank, local_rank = divmod(place, procs)
    return Member(f"{place}.{number}", node_rank, local_rank, "10.0.0.1", 1000 + place, f"pod-{number}")


def view(size: int, number: int = 0, procs: int = 1) -> View:
    return View(number, tuple(member(place, procs=procs) for place in range(size)), "0.0", "10.0.0.1", 1)


LONG = SILENT_SECONDS + 1


@pytest.mark.parametrize(
    ("own", "answers", "waited", "verdict"),
    [
        ("0.0", Answers(), 0.0, Verdict.WAIT),  # those that were not asked yet may be alive
        ("0.0", Answers(arrived={"1.0", "2.0"}), 0.0, Verdict.WAIT),
        ("0.0", Answers(arrived={"1.0", "2.0"}, gone={"3.0"}), 0.0, Verdict.PROPOSE),
        ("0.0", Answers(arrived={"1.0", "2.0"}, silent={"3.0": 1.0}), 0.0, Verdict.WAIT),
        ("0.0", Answers(arrived={"1.0", "2.0"}, silent={"3.0": LONG}), 0.0, Verdict.PROPOSE),
        ("0.0", Answers(gone={"1.0", "2.0", "3.0"}), 0.0, Verdict.PROPOSE),  # no other half can be
        ("0.0", Answers(arrived={"1.0"}, silent={"2.0": LONG, "3.0": LONG}), 0.0, Verdict.PROPOSE),  # has the first
        ("2.0", Answers(arrived={"3.0"}, silent={"0.0": LONG, "1.0": LONG}), 0.0, Verdict.WAIT),
        ("2.0", Answers(arrived={"3.0"}, silent={"0.0": LONG, "1.0": LONG}), MINORITY_SECONDS, Verdict.PROPOSE),
        ("3.0", Answers(silent={"0.0": LONG, "1.0": LONG, "2.0": LONG}), 1.0, Verdict.WAIT),
    ],
)
def test_the_next_view_is_proposed_once_nobody_is_missing(
    own: str, answers: Answers, waited: float, verdict: Verdict
) -> None:
    assert judged(view(4), own, answers, joining=[], least=1, waited=waited) is verdict


@pytest.mark.parametrize(("joining", "verdict"), [(0, Verdict.TOO_FEW), (1, Verdict.PROPOSE)])
def test_too_few_members_wait_for_a_replacement(joining: int, verdict: Verdict) -> None:
    answers = Answers(arrived={"1.0"}, gone={"2.0"})
    new = [member(2, 1)][:joining]
    assert judged(view(3), "0.0", answers, joining=new, least=3, waited=0.0) is verdict


def test_too_few_members_give_up_where_no_replacement_comes() -> None:
    answers = Answers(arrived={"1.0"}, gone={"2.0"})
    verdict = judged(view(3), "0.0", answers, joining=[], least=3, waited=REPLACEMENT_SECONDS)
    assert verdict is Verdict.GIVE_UP


def test_ranks_follow_places_and_a_new_process_takes_the_place_of_a_lost_one() -> None:
    newer = member(1, number=7)
    assert successors(view(3), "0.0", {"2.0"}, [newer]) == (member(0), newer, member(2))


def test_a_pod_goes_on_and_joins_as_a_whole() -> None:
    new = [member(place, 1, procs=2) for place in (2, 3)]
    found = successors(view(6, procs=2), "4.0", {"2.0", "5.0"}, [new[1]], procs=2)
    assert [one.id for one in found] == ["4.0", "5.0"], "a rank without the others of its pod"
    found = successors(view(6, procs=2), "4.0", {"2.0", "5.0"}, new[::-1], procs=2)
    assert [one.id for one in found] == ["2.1", "3.1", "4.0", "5.0"]
    mixed = [member(2, 1, procs=2), member(3, 2, procs=2)]
    found = successors(view(6, procs=2), "4.0", {"5.0"}, mixed, procs=2)
    assert [one.id for one in found] == ["4.0", "5.0"], "ranks of two pods, which had one place after the other"


def test_of_two_pods_in_one_place_the_newer_one_goes_on() -> None:
    new = [member(place, 1, procs=2) for place in (0, 1)]
    found = successors(view(4, procs=2), "0.0", {"1.0", "2.0", "3.0"}, new, procs=2)
    assert [one.id for one in found] == ["0.1", "1.1", "2.0", "3.0"]


@pytest.mark.parametrize(
    ("answers", "joining", "verdict"),
    [
        (Answers(arrived={"1.0", "2.0", "4.0"}, gone={"3.0", "5.0"}), [], Verdict.TOO_FEW),  # one pod, and two halves
        (Answers(arrived={"1.0", "2.0"}, gone={"3.0", "4.0", "5.0"}), [2, 4], Verdict.TOO_FEW),
        (Answers(arrived={"1.0", "2.0"}, gone={"3.0", "4.0", "5.0"}), [2, 3], Verdict.PROPOSE),
    ],
)
def test_the_ranks_of_whole_pods_count(answers: Answers, joining: list[int], verdict: Verdict) -> None:
    new = [member(place, 1, procs=2) for place in joining]
    found = judged(view(6, procs=2), "0.0", answers, joining=new, least=4, waited=0.0, procs=2)
    assert found is verdict


def test_a_pod_and_the_newer_one_in_its_place_count_once() -> None:
    answers, newer = Answers(arrived={"1.0"}, gone={"2.0", "3.0"}), [member(place, 1, procs=2) for place in (0, 1)]
    found = [
        judged(view(4, procs=2), "0.0", answers, joining=newer, least=least, waited=0.0, procs=2) for least in (2, 4)
    ]
    assert found == [Verdict.PROPOSE, Verdict.TOO_FEW]


def test_ranks_that_are_silent_in_a_pod_that_is_lost_go_on_nowhere() -> None:
    answers = Answers(arrived={"1.0"}, gone={"2.0", "4.0", "6.0"}, silent={"3.0": LONG, "5.0": LONG, "7.0": LONG})
    assert judged(view(8, procs=2), "0.0", answers, joining=[], least=2, waited=0.0, procs=2) is Verdict.PROPOSE
    others = Answers(arrived={"5.0"}, gone={"2.0"}, silent={"0.0": LONG, "1.0": LONG, "3.0": LONG})
    assert judged(view(6, procs=2), "4.0", others, joining=[], least=2, waited=0.0, procs=2) is Verdict.WAIT


def test_a_rank_that_has_arrived_is_not_lost_by_a_question_that_it_left_open_before() -> None:
    """Nobody asks it again, so the question stays open."""
    answers = Answers(arrived={"1.0", "3.0"}, gone={"3.0"}, silent={"1.0": LONG, "2.0": LONG})
    assert lost(view(4), "0.0", answers) == ["2.0", "3.0"]


def test_a_view_survives_its_file() -> None:
    assert View.from_json(view(3, number=5).to_json()) == view(3, number=5)


@given(st.lists(st.integers(-1, 50), min_size=1, max_size=8))
def test_the_state_comes_from_a_rank_that_is_ahead(steps: list[int]) -> None:
    source = source_of_state(steps)
    assert steps[source] == max(steps)
    assert source == steps.index(max(steps))


# A model: what ranks, the volume and the network may do, in any order


@dataclass
class Rank:
    """One process. `history`: the steps that made its state, each with the view that computed it and its proposer."""

    member: Member
    view: View
    history: list[tuple[int, int, str]] = field(default_factory=list)
    next: View | None = None
    """What it was answered, or has read, about the view after its own."""

    has_group: bool = True
    """It is in the group of its view; else it has left the view and wants the next."""

    lives: bool = True
    is_excluded: bool = False

    @property
    def step(self) -> int:
        return len(self.history)


class World:
    """Ranks that follow the shipped decisions, and a volume on which each view is written once."""

    def __init__(self, pods: int, procs: int) -> None:
        self.procs = procs
        self.views = [view(pods * procs, procs=procs)]
        self.ranks = [Rank(one, self.views[0]) for one in self.views[0].members]
        self.waiting: list[Rank] = []
        self.sent: dict[tuple[int, str], int] = {}
        """The last step for which a member of a view has sent its part; what is on its way arrives at any time."""

    def register(self, proposal: View) -> View:
        """The volume takes the first proposal of a number."""
        if len(self.views) == proposal.number:
            self.views.append(proposal)
        return self.views[proposal.number]

    def send(self, rank: Rank) -> None:
        """It computes its part of the next gradient."""
        if rank.has_group:
            self.sent[rank.view.number, rank.member.id] = rank.step + 1

    def finish(self, rank: Rank) -> None:
        """The whole gradient arrives at one rank, if every member of its view has sent its part."""
        parts = [self.sent.get((rank.view.number, one.id), 0) for one in rank.view.members]
        if rank.has_group and min(parts) > rank.step:
            rank.history.append((rank.step + 1, rank.view.number, rank.view.proposer))

    def leave(self, rank: Rank) -> None:
        rank.has_group = False

    def die(self, rank: Rank) -> None:
        rank.lives = rank.has_group = False

    def propose(self, rank: Rank, gone: set[str], silent: set[str]) -> None:
        """It coordinates, whatever it believes of the others, and whoever else does."""
        if rank.has_group:
            return
        came = [
            other
            for other in self.ranks
            if other.view is rank.view and other.lives and not other.has_group and other is not rank
            if other.member.id not in gone | silent
        ]
        arrived = {other.member.id for other in came}
        answers = Answers(arrived, gone, dict.fromkeys(silent, LONG))
        if {one.id for one in mates(rank.view, rank.member)} & (gone | silent):
            rank.is_excluded = True
            return
        waited = MINORITY_SECONDS  # the wait only makes it likely that the larger half wins
        least, procs, new = self.procs, self.procs, [one.member for one in self.waiting]
        verdict = judged(rank.view, rank.member.id, answers, joining=new, least=least, waited=waited, procs=procs)
        if verdict is not Verdict.PROPOSE:
            return
        members = successors(rank.view, rank.member.id, arrived, new, procs)
        proposal = View(rank.view.number + 1, members, rank.member.id, "10.0.0.1", 1)
        for other in (rank, *came, *self.waiting):
            other.next = self.register(proposal)
        self.ranks += self.waiting
        self.waiting = []

    def learn(self, rank: Rank) -> None:
        """It reads the newest view, whatever it was answered."""
        if not rank.has_group and self.views[-1].number > rank.view.number:
            rank.next = self.views[-1]

    def form(self, rank: Rank) -> None:
        """The group of the view that this rank wants to go on in, if all of its members are there."""
        wanted = rank.next
        if rank.has_group or wanted is None:
            return
        if wanted.rank_of(rank.member.id) is None:
            rank.is_excluded = True
            return
        coming = [one for one in self.ranks if one.lives and not one.has_group and one.next == wanted]
        coming = [one for one in coming if wanted.rank_of(one.member.id) is not None]
        if len(coming) < len(wanted.members):
            rank.view, rank.next = wanted, None  # it waits in vain, and wants the view after this one
            return
        coming.sort(key=lambda one: wanted.rank_of(one.member.id) or 0)
        source = coming[source_of_state([one.step for one in coming])]
        for one in coming:
            one.view, one.next, one.history, one.has_group = wanted, None, list(source.history), True

    def replace(self, node_rank: int, number: int) -> None:
        """A new pod in the place of one that has ended."""
        for place in range(node_rank * self.procs, (node_rank + 1) * self.procs):
            self.waiting.append(Rank(member(place, number, self.procs), self.views[-1], has_group=False))


ACTIONS = ("send", "finish", "leave", "die", "learn", "form", "partition", "replace", "step")


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), pods=st.integers(2, 5), procs=st.integers(1, 2))
def test_two_halves_never_both_go_on(data: st.DataObject, pods: int, procs: int) -> None:
    world, replaced = World(pods, procs), 0
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(ACTIONS))
        able = [rank for rank in world.ranks if rank.lives and not rank.is_excluded]
        chosen = [rank for rank in able if data.draw(st.booleans())]
        others = [rank for rank in able if rank not in chosen]
        if action == "step":
            for rank in able:
                world.send(rank)
            for rank in chosen:
                world.finish(rank)
        elif action == "partition":
            for rank in able:
                world.leave(rank)
            for half, beyond in ((chosen, others), (others, chosen)):
                for rank in half[:1]:
                    silent = {one.member.id for one in beyond if one.view is rank.view}
                    ended = {one.id for one in rank.view.members} - {one.member.id for one in able}
                    world.propose(rank, ended, silent)
        elif action == "replace":
            nodes = {rank.member.node_rank for rank in able}
            lost = [rank for rank in world.ranks if rank.member.node_rank not in nodes]
            if lost and not world.waiting:
                replaced += 1
                world.replace(lost[0].member.node_rank, replaced)
        else:
            for rank in chosen:
                getattr(world, action)(rank)
        check(world)


def check(world: World) -> None:
    """Of all histories, one goes on. Any other ends within one step of where it parted from that one."""
    for one in world.views:
        assert len(one.members) == world.procs * len(whole_pods(one.members, world.procs)), "a part of a pod"
    training = [rank for rank in world.ranks if rank.has_group]
    for rank in world.ranks:
        steps = [step for step, *_ in rank.history]
        assert steps == list(range(1, rank.step + 1)), "a step is missing, or was taken twice"
    if training:
        ahead = max(training, key=lambda rank: (rank.view.number, rank.step))
        for rank in training:
            parted = [entry for entry in rank.history if entry not in ahead.history]
            assert len(parted) <= 1, "a rank that was left behind has finished more than its last step"
            if rank.view.number == ahead.view.number:
                assert not parted, "two ranks of one view have different histories"
                assert ahead.step - rank.step <= 1


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), samples=st.integers(1, 120), global_batch=st.integers(1, 40))
def test_each_sample_counts_once_whatever_the_views(data: st.DataObject, samples: int, global_batch: int) -> None:
    assume(global_batch <= samples)
    plan = BatchPlan(samples=samples, global_batch=global_batch, seed=3)
    cursor, trained = Cursor(plan), []
    while cursor.epoch == 0:
        batch = next(plan.batches(0, cursor.offset))
        size = data.draw(st.integers(1, 6))  # of the view that takes this step
        micro_batch = data.draw(st.sampled_from([None, 1, 3]))
        for rank in range(size):
            for indices, count in micro_batches(batch, rank, size, micro_batch):
                trained += indices[:count].tolist()
        cursor.advance(len(batch))
    assert trained == plan.order(0).tolist()
