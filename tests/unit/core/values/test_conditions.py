"""Conditions by the rules of the Kubernetes API conventions."""

from __future__ import annotations

from builders import NOW, later

from ddpjob_operator.api.status import Condition
from ddpjob_operator.core.values import conditions as cond

TRUE = cond.set_condition((), cond.Update(cond.RUNNING, True, "GangRunning", "all run"), NOW, 1)


def test_a_condition_that_never_held_is_not_written_as_false() -> None:
    assert cond.set_condition((), cond.Update(cond.DEGRADED, False, "AsExpected", ""), NOW, 1) == ()


def test_that_something_is_not_so_can_be_said_where_it_matters() -> None:
    (said,) = cond.set_condition((), cond.Update(cond.SUSPENDED, False, "Suspending", "", write_false=True), NOW, 1)
    assert (said.status, said.reason, said.last_transition_time) == ("False", "Suspending", NOW)


def test_the_time_of_transition_stays_while_the_status_does() -> None:
    (after,) = cond.set_condition(TRUE, cond.Update(cond.RUNNING, True, "Other", "words"), later(9), 2)
    assert (after.last_transition_time, after.reason, after.observed_generation) == (NOW, "Other", 2)


def test_the_time_of_transition_moves_with_the_status() -> None:
    (after,) = cond.set_condition(TRUE, cond.Update(cond.RUNNING, False, "Restarting", ""), later(9), 1)
    assert (after.status, after.last_transition_time) == ("False", later(9))


def test_conditions_keep_their_order_and_their_neighbours() -> None:
    both = cond.set_condition(TRUE, cond.Update(cond.DEGRADED, True, "Quota", "none left"), NOW, 1)
    after = cond.set_condition(both, cond.Update(cond.RUNNING, False, "Restarting", ""), NOW, 1)
    assert [condition.type for condition in after] == [cond.RUNNING, cond.DEGRADED]
    assert after[1] == both[1]


def test_saying_the_same_again_changes_nothing() -> None:
    assert cond.set_condition(TRUE, cond.Update(cond.RUNNING, True, "GangRunning", "all run"), later(9), 1) == TRUE


def test_words_without_end_are_cut_to_what_the_api_server_takes() -> None:
    (after,) = cond.set_condition((), cond.Update(cond.FAILED, True, "r" * 5000, "m" * 50_000), NOW, 1)
    assert (len(after.reason), len(after.message)) == (1024, 32768)


def test_only_a_true_condition_holds() -> None:
    assert cond.holds(TRUE, cond.RUNNING)
    assert not cond.holds(TRUE, cond.FAILED)
    assert not cond.holds((Condition(type=cond.FAILED, status="False", last_transition_time=NOW),), cond.FAILED)
