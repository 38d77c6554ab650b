"""A run that is killed or stopped anywhere ends with the same bits as one that was left alone.

One whose number of ranks changes on the way is in tests/trainer/proofs.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from tests.support.starting import starts_processes
from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.train.volume import Volume

# Dropout, shuffled data, momentum and a schedule: all of it state. 23 steps an epoch, a snapshot every 7.
STEPS = ("--max-steps", "40", "--scheduler", "cosine", "--warmup-steps", "5", "--micro-batch", "20")
UNBROKEN = ("--task", "seeded_tasks:Struck", *STEPS)


def struck(signal: str = "SIGKILL", *, rank: int = 1, call: int, evaluating: bool = False) -> tuple[str, ...]:
    options = {"signal_name": signal, "rank": rank, "call": call, "evaluating": str(evaluating).lower()}
    pairs = [part for key, value in options.items() for part in ("--task-options", f"{key}={value}")]
    return (*UNBROKEN, *pairs)


@pytest.mark.parametrize(
    ("ranks", "strike", "planned"),
    [
        # One loss is a rehearsal before the first step; then each step has two, and the last of an epoch one.
        pytest.param(2, struck(rank=1, call=33), 7, id="rank 1 in the middle of an accumulation"),
        pytest.param(2, struck(rank=0, call=60), 21, id="rank 0 before the last backward pass of a step"),
    ],
)
def test_a_run_killed_with_sigkill_resumes_to_the_same_weights_and_losses(
    volume, trained_once, ranks: int, strike: tuple[str, ...], planned: int
) -> None:
    killed = volume.train(ranks, *strike)
    assert killed.returncode != 0
    # that of the interval, or an emergency one that the surviving rank 0 left
    newest = volume.snapshot_steps()[-1]
    # one that was still being written in the background when its writer was killed is lost; the one before is
    # whole
    assert newest >= planned - 7
    volume.trained(ranks, *strike, DDPJOB_ATTEMPT="1")
    (resumed,) = volume.events("resumed")
    assert resumed["step"] == newest
    assert [event["step"] for event in volume.events("first_step")] == [1, newest + 1]
    volume.assert_same_end(trained_once(ranks, *UNBROKEN))


def test_a_run_that_plain_torchrun_restarts_ends_with_the_same_weights_and_losses(volume, trained_once) -> None:
    volume.trained(2, *struck(rank=1, call=2, evaluating=True), PET_MAX_RESTARTS="1")
    (resumed,) = volume.events("resumed")
    assert resumed["step"] >= 14
    volume.assert_same_end(trained_once(2, *UNBROKEN))


def test_an_exception_on_one_rank_leaves_an_emergency_snapshot_of_the_last_whole_step(volume, trained_once) -> None:
    # in the first micro-batch of step 18; the last snapshot by plan is that of step 14
    raising = struck("none", rank=1, call=36)
    failed = replace(volume, fresh=True).train(2, *raising)
    assert failed.returncode != 0
    assert "a sample that cannot be trained on" in failed.stderr
    manifest = volume.newest_manifest()
    assert (manifest["kind"], manifest["step"]) == ("emergency", 17), volume.events("snapshot_failed")
    volume.trained(2, *raising, DDPJOB_ATTEMPT="1")
    volume.assert_same_end(trained_once(2, *UNBROKEN))


@pytest.mark.parametrize("name", ["fp16", "normalised", "noisy", "manual", "fsdp", "pipeline"])
def test_what_else_is_state_resumes_to_the_same_bits(resumed, name: str) -> None:
    broken, unbroken = resumed(name)
    broken.assert_same_end(unbroken)


def test_a_sharded_run_goes_on_with_another_number_of_ranks(volume) -> None:
    fsdp = ("--strategy", "fsdp", "--task", "tiny_lm", "--global-batch", "6", "--task-options", "samples=60")
    shape = ("--task-options", "d_model=64", "--task-options", "n_layers=2")
    volume.trained(2, *fsdp, *shape, "--max-steps", "3")
    volume.trained(1, *fsdp, *shape, "--max-steps", "5", DDPJOB_ATTEMPT="1")
    assert [event["step"] for event in volume.events("resumed")] == [3]
    assert sorted(volume.losses()) == [1, 2, 3, 4, 5]


def test_three_ranks_resume_to_the_same_bits_though_ddp_packs_its_buckets_anew(volume, trained_once) -> None:
    three = ("--task", "tiny_lm", "--global-batch", "6", "--max-steps", "6")
    small = ("--task-options", "d_model=64", "--task-options", "samples=60", "--task-options", "n_layers=2")
    volume.trained(3, *three, *small, "--max-steps", "3", DDPJOB_SNAPSHOT_EVERY="3steps")
    volume.trained(3, *three, *small, DDPJOB_ATTEMPT="1")
    assert [event["step"] for event in volume.events("resumed")] == [3]
    volume.assert_same_end(trained_once(3, *three, *small))


@pytest.mark.parametrize(
    ("strike", "stopped_after"),
    [
        # SIGTERM in step 9: voted on at its end, known at the end of the next
        pytest.param(struck("SIGTERM", rank=1, call=18), 10, id="during a step"),
        pytest.param(struck("SIGTERM", rank=0, call=1, evaluating=True), 23, id="during validation"),
    ],
)
def test_sigterm_to_one_rank_stops_all_after_the_same_step_with_a_snapshot_and_143(
    volume, trained_once, strike: tuple[str, ...], stopped_after: int
) -> None:
    stopped = volume.train(2, *strike)
    assert re.search(r"exitcode *: 143", stopped.stderr), stopped.stderr
    manifest = volume.newest_manifest()
    assert (manifest["kind"], manifest["step"]) == ("preempted", stopped_after)
    # each node tells of it at its end: what one says may get lost
    assert {beat["rank"]: beat["snapshot"]["step"] for beat in volume.beats()} == {0: stopped_after, 1: stopped_after}
    assert len(volume.losses()) == stopped_after
    volume.trained(2, *strike, DDPJOB_ATTEMPT="1")
    volume.assert_same_end(trained_once(2, *UNBROKEN))


def test_sigterm_to_the_whole_process_group_leaves_data_workers_time_for_the_last_steps(volume) -> None:
    process = replace(volume, fresh=True).start(2, "--task-options", "width=8", "--epochs", "1000", "--workers", "1")
    until = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < until:
        if any((beat["step"] or 0) >= 5 for beat in volume.beats()):
            break
        time.sleep(0.05)
    # torchrun passes it on to the process groups of its ranks, in which the data workers are
    process.terminate()
    _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert volume.newest_manifest()["kind"] == "preempted", stderr
    assert volume.events("preempted")[0]["step"] == volume.snapshot_steps()[-1] >= 5


def test_a_run_that_is_done_is_not_trained_again(volume) -> None:
    steps = ("--strategy", "single", "--task-options", "width=8", "--max-steps", "5")
    volume.trained(0, *steps)
    losses = volume.losses()
    volume.trained(0, *steps, DDPJOB_ATTEMPT="1")
    assert volume.losses() == losses
    assert [event["step"] for event in volume.events("resumed")] == [5]


def test_a_run_that_is_past_its_new_end_has_no_steps_to_train(train_here, capfd) -> None:
    train_here("--task=toy_linear", "--max-steps=4")
    volume = train_here("--task=toy_linear", "--max-steps=2")
    assert "on 1 cpu rank(s): 0 steps to train" in capfd.readouterr().out
    assert sorted(volume.losses()) == [1, 2, 3, 4]


def test_another_global_batch_is_refused_and_the_message_names_it(volume) -> None:
    steps = ("--strategy", "single", "--task-options", "width=8", "--max-steps", "7")
    volume.trained(0, *steps)
    refused = volume.train(0, *steps, "--global-batch", "32", DDPJOB_ATTEMPT="1")
    assert refused.returncode != 0
    assert "--global-batch" in refused.stderr


SMALL = ("--strategy", "single", "--task-options", "width=8", "--max-steps", "3", "--optimizer", "sgd", "--lr", "0.1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--optimizer", "adam"), "the snapshot's run had --optimizer sgd, this one has adam"),
        (("--lr", "0.01"), "the snapshot's run had --lr 0.1, this one has 0.01"),
        (("--momentum", "0.9"), "the snapshot's run had --momentum 0.0, this one has 0.9"),
        (("--weight-decay", "0.5"), "the snapshot's run had --weight-decay 0.0, this one has 0.5"),
    ],
    ids=["optimizer", "lr", "momentum", "weight decay"],
)
def test_other_settings_of_the_optimizer_are_refused_by_name(
    saved_small, change: tuple[str, ...], message: str
) -> None:
    refused = saved_small.train(0, *SMALL, *change, "--max-steps", "4", DDPJOB_ATTEMPT="1")
    assert refused.returncode == 64
    assert message in refused.stderr


@pytest.fixture(scope="module")
@starts_processes
def saved_small(tmp_path_factory: pytest.TempPathFactory) -> Volume:
    """Three steps with plain SGD."""
    return Volume(tmp_path_factory.mktemp("small")).trained(0, *SMALL)


def test_another_kind_of_adam_is_refused_where_the_optimizer_is_sharded_too(volume) -> None:
    fsdp = ("--strategy", "fsdp", "--task", "toy_linear", "--max-steps")
    volume.trained(1, *fsdp, "2")
    refused = volume.train(1, *fsdp, "3", "--optimizer", "adam", DDPJOB_ATTEMPT="1")
    assert "the snapshot's run had --optimizer adamw, this one has adam" in refused.stderr
