"""Two real ranks under torchrun: rank 0 decides, and nobody deadlocks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.starting import starts_processes
from tests.trainer.snapshots.under_torchrun import of_both_ranks, torchrun, until_one_fails

from ddp_trainer.snapshots.session import Identity, Progress, SaveInterval, SnapshotEvent, Snapshots

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
@starts_processes
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two ranks left their volumes and what they saw."""
    out = tmp_path_factory.mktemp("two-ranks")
    one_rank_saves(out / "resume_what_one_rank_saved" / "digits")
    torchrun(2, "two_ranks.py", out)
    return out


@pytest.fixture(scope="module")
@starts_processes
def seen(out: Path) -> list[dict[str, Any]]:
    return of_both_ranks(out)


def test_resuming_two_ranks_with_dropout_is_bitwise(seen: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        result = seen[rank]["resume_is_bitwise"]
        assert result["step"] == 4
        assert result["losses"][0] == result["losses"][1]
        assert result["weights"][0] == result["weights"][1]
    assert seen[0]["resume_is_bitwise"]["losses"] != seen[1]["resume_is_bitwise"]["losses"], (
        "each rank has its own random numbers"
    )


def test_a_state_that_only_one_rank_has_is_refused_by_name_on_all(seen: list[dict[str, Any]]) -> None:
    """Such as an average of the weights that rank 0 alone keeps."""
    for ranks in seen:
        of_first, of_second = ranks["only_one_rank_has_a_state"]
        assert "rank 0 has a state 'ema', which rank 1 has not: pass it to attach() on every rank" in of_first
        assert "rank 1 has a state 'ema', which rank 0 has not" in of_second


def test_where_one_rank_cannot_note_the_end_of_a_step_none_waits_for_it_there(seen: list[dict[str, Any]]) -> None:
    (is_saved, messages), _ = (ranks["only_one_rank_has_an_obstacle"] for ranks in seen)
    assert not is_saved
    assert "no emergency snapshot: ema has state of its own (get_extra_state)" in messages[-1]


def test_a_snapshot_that_only_rank_0_sees_is_resumed_by_all(seen: list[dict[str, Any]]) -> None:
    results = [ranks["only_rank_0_sees_the_snapshot"] for ranks in seen]
    assert [result["step"] for result in results] == [2, 2]
    assert all(result["weights"][0] == result["weights"][1] for result in results)


def test_a_rank_that_reads_other_bytes_gets_those_of_rank_0(seen: list[dict[str, Any]]) -> None:
    results = [ranks["rank_1_reads_other_bytes"] for ranks in seen]
    assert [result["step"] for result in results] == [2, 2]
    assert all(result["weights"][0] == result["weights"][1] for result in results)


def test_all_ranks_stop_when_rank_0_is_fenced(seen: list[dict[str, Any]]) -> None:
    assert all("attempt 4 (uid uid-1) is fenced: attempt 5" in ranks["rank_0_is_fenced"] for ranks in seen)


def test_all_ranks_stop_when_the_snapshot_does_not_fit_on_one(seen: list[dict[str, Any]]) -> None:
    for ranks in seen:
        kind, exit_code, message = ranks["the_program_has_changed_on_one_rank"]
        assert (kind, exit_code) == ("IncompatibleSnapshotError", 64)
        assert "does not fit this program (rank 1): model:" in message


def test_every_rank_knows_whether_the_snapshot_it_waited_for_is_on_the_disk(seen: list[dict[str, Any]]) -> None:
    for ranks in seen:
        good, bad, fenced = ranks["every_rank_learns_whether_a_waited_for_save_succeeded"]
        assert (good, bad) == (True, False)
        assert "newer attempt" in fenced or "is fenced" in fenced


def test_timed_saves_are_agreed_by_all_ranks(seen: list[dict[str, Any]]) -> None:
    first, second = (ranks["timed_saves_happen_at_one_step_on_all_ranks"] for ranks in seen)
    assert first == second
    assert len(first) >= 2


def one_rank(directory: Path, *, attempt: int) -> tuple[torch.nn.Module, Snapshots, list[SnapshotEvent]]:
    torch.manual_seed(attempt)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    events: list[SnapshotEvent] = []
    snapshots = Snapshots(
        directory,
        {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)},
        every=SaveInterval.parse("2steps"),
        keep=9,
        identity=Identity("digits", "uid-1", 1, attempt, 0, 1),
        strategy="single",
        global_batch=16,
        on_event=events.append,
    )
    return model, snapshots, events


def weights_of(model: torch.nn.Module) -> list[float]:
    return [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]


def one_rank_saves(directory: Path) -> None:
    _, snapshots, _ = one_rank(directory, attempt=0)
    snapshots.resume()
    assert snapshots.save(Progress(7, 0, 7 * 16), kind="final", wait=True)


@pytest.mark.fault(38)
def test_a_snapshot_of_two_ranks_is_resumed_by_one_that_says_so(out: Path, seen: list[dict[str, Any]]) -> None:
    def resume() -> tuple[torch.nn.Module, list[SnapshotEvent], torch.Tensor]:
        model, snapshots, events = one_rank(out / "train_and_save_as_two" / "digits", attempt=1)
        assert snapshots.resume() is not None
        return model, events, torch.rand(3)

    model, events, drawn = resume()
    assert weights_of(model) == seen[0]["train_and_save_as_two"]
    assert [event.result for event in events] == ["reseeded", "resumed"]
    assert "is of 2 ranks, this is 1: random numbers start anew" in events[0].message
    torch.manual_seed(77)
    assert torch.equal(resume()[2], drawn)


@pytest.mark.fault(38)
def test_a_snapshot_of_one_rank_is_resumed_by_two_that_say_so(out: Path, seen: list[dict[str, Any]]) -> None:
    model, snapshots, _ = one_rank(out / "resume_what_one_rank_saved" / "digits", attempt=2)
    assert snapshots.resume() is not None
    results = [ranks["resume_what_one_rank_saved"] for ranks in seen]
    for step, weights, _, messages in results:
        assert step == 7
        assert weights == weights_of(model)
        assert "is of 1 ranks, this is 2: random numbers start anew" in messages[0]
    assert results[0][2] != results[1][2], "each rank draws numbers of its own"


def test_auto_saves_at_one_step_on_all_ranks_and_then_as_often_as_stall_and_history_say(
    seen: list[dict[str, Any]],
) -> None:
    first, second = (ranks["auto_chooses_its_interval_from_stall_and_history"] for ranks in seen)
    assert first["saved"] == second["saved"]
    assert len(first["saved"]) == 1, "after the first save the interval is at least 10 s"
    (chosen,) = first["chosen"]
    assert chosen["failures"] == 2, "two attempts were claimed before this one"
    # one node, three attempts within minutes: the prior of 24 h over three failures
    assert chosen["mttf_seconds"] == pytest.approx(24 * 3600 / 3, rel=0.02)
    assert chosen["stall_seconds"] > 0
    young = math.sqrt(2 * chosen["mttf_seconds"] * chosen["stall_seconds"])
    expected = max(young, chosen["save_seconds"], chosen["stall_seconds"] / 0.035, 10.0)
    assert first["interval"] == chosen["seconds"] == pytest.approx(min(expected, 3600.0))


def test_an_exception_on_any_rank_leaves_a_snapshot_from_which_all_go_on_bitwise(seen: list[dict[str, Any]]) -> None:
    results = [ranks["an_exception_on_one_rank_leaves_an_emergency_snapshot"] for ranks in seen]
    for result in results:
        assert result["resumed"] == [None, 4, 7]
        assert result["losses"][0] == result["losses"][1]
        assert result["weights"][0] == result["weights"][1]
    assert results[1]["raised"] == ["BrokenBatch", "RuntimeError"]
    assert results[0]["raised"] == ["RuntimeError", "BrokenBatch"]
    assert [text.split(" saved")[0] for text in results[0]["messages"] if "emergency" in text] == [
        "emergency snapshot of step 4",
        "emergency snapshot of step 7",
    ]


@pytest.mark.processes
def test_a_rank_that_fails_ends_after_rank_0_has_what_a_snapshot_needs_of_it(tmp_path: Path) -> None:
    """It may be a step ahead of rank 0, and gloo sends only what is waited for."""
    said = until_one_fails(tmp_path)
    assert said[0].startswith("True emergency snapshot of step 2 saved"), said
