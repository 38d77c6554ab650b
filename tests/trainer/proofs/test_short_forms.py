"""The proofs of `make prove` in short, so that every change meets them; what other tests show already is left to those.

Agreement of the strategies: tests/trainer/train/test_steps.py, all of them with smaller models. Bitwise resume after
one rank was killed, of every strategy and kind of state: tests/trainer/train/test_resume.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.prove import agreement, bitwise_resume, document, elastic, published_run
from tests.prove.training import losses, trained_in_one_start
from tests.support.starting import starts_processes
from tests.trainer.train.volume import Volume

SAME_ON_ANY_MACHINE = 1e-4
"""What instruction sets and versions of torch may change of a first loss; a wrong seed or order changes 0.01."""


@pytest.fixture(scope="module")
@starts_processes
def first_steps(tmp_path_factory: pytest.TempPathFactory) -> Volume:
    """The first steps of kept runs, trained by one rank: the number of ranks changes no loss."""
    volume = Volume(tmp_path_factory.mktemp("first-steps"))
    single = ("--strategy", "single")
    jobs = {
        "published": (*published_run.arguments("the notebook's", steps=2), *single),
        "shuffled": (*published_run.arguments("the trainer's", steps=1), *single),
        "adamw": agreement.arguments("AdamW", agreement.REFERENCE, steps=4),
        "sgd": agreement.arguments("SGD", agreement.REFERENCE, steps=4),
    }
    trained_in_one_start(volume, 0, jobs)
    return volume


@pytest.mark.parametrize(("job", "variant"), [("published", "the notebook's"), ("shuffled", "the trainer's")])
def test_the_first_losses_of_the_published_run_are_those_of_the_document(first_steps, job: str, variant: str) -> None:
    (kept,) = [run.losses for run in document.read().published_run if run.variant == variant]
    found = losses(Volume(first_steps.root, job))
    assert found == pytest.approx(kept[: len(found)], abs=SAME_ON_ANY_MACHINE)


def test_the_published_weights_and_samples_have_the_published_first_loss(first_steps) -> None:
    # printed with four digits
    assert losses(Volume(first_steps.root, "published"))[0] == pytest.approx(published_run.PUBLISHED[0], abs=1e-4)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_the_first_losses_of_the_reference_are_those_of_the_document(first_steps, optimizer: str) -> None:
    (kept,) = [
        run.losses for run in document.read().agreement if (run.optimizer, run.way) == (optimizer, agreement.REFERENCE)
    ]
    found = losses(Volume(first_steps.root, optimizer.lower()))
    assert found == pytest.approx(kept[: len(found)], abs=SAME_ON_ANY_MACHINE)


@pytest.mark.fault(36, 40)
@pytest.mark.processes
def test_a_run_killed_with_half_of_a_snapshot_written_resumes_to_the_same_bits(tmp_path: Path) -> None:
    (moment,) = [m for m in bitwise_resume.moments() if (m.strategy, m.phase) == ("single", "save")]
    (resume,) = bitwise_resume.measure(tmp_path, [replace(moment, step=15, part=6)])
    assert resume.problem is None
    assert resume.resumed_from == 10
    assert resume.where.startswith("half of the write of ")


@pytest.mark.fault(38)
@pytest.mark.processes
def test_ranks_that_come_and_go_take_every_sample_once_an_epoch_at_the_same_rates(tmp_path: Path) -> None:
    resized = elastic.resized(tmp_path, "ddp")
    assert resized.problem is None


@pytest.mark.processes
def test_a_number_of_ranks_that_does_not_divide_the_batch_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    assert elastic.refusal(tmp_path).problem is None
