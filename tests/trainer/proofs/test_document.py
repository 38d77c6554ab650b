"""docs/correctness.md says what was measured and nothing else, and what was measured is as it must be."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from tests.prove import __main__ as command
from tests.prove import agreement, bitwise_resume, document, elastic, published_run
from tests.prove.document import PROOFS, Figures
from tests.prove.tables import BROKEN


@pytest.fixture(scope="module")
def figures() -> Figures:
    return document.read()


def test_the_document_is_what_its_figures_and_the_proofs_say(figures) -> None:
    text = document.DOCUMENT.read_text()
    assert text == document.render(figures), "write it anew: python -m tests.prove --write"


@pytest.mark.parametrize("name", PROOFS)
def test_every_figure_is_within_its_limit(figures, name: str) -> None:
    assert PROOFS[name].violations(figures.of(name)) == []
    assert BROKEN not in document.DOCUMENT.read_text()


@pytest.mark.parametrize("broken", [False, True])
def test_the_command_fails_and_writes_nothing_if_one_row_is_beyond_its_limit(
    figures, monkeypatch, capsys, tmp_path: Path, broken: bool
) -> None:
    for name, proof in PROOFS.items():
        rows = list(figures.of(name))
        if broken and name == "bitwise_resume":
            rows[7] = replace(rows[7], different=("optimizer.safetensors",))
        monkeypatch.setattr(proof, "measure", lambda folder, rows=rows: iter(rows))
    for place in ("DOCUMENT", "FIGURES"):
        monkeypatch.setattr(document, place, tmp_path / getattr(document, place).name)
    monkeypatch.setattr("sys.argv", ["prove", "--write"])
    assert command.main() == int(broken)
    assert ("not the same as in the unbroken run: optimizer.safetensors" in capsys.readouterr().out) == broken
    assert len(list(tmp_path.iterdir())) == (0 if broken else 2)


@pytest.mark.parametrize("name", PROOFS)
def test_a_row_that_is_missing_is_a_violation(figures, name: str) -> None:
    rows = figures.of(name)
    assert all(PROOFS[name].violations([*rows[:place], *rows[place + 1 :]]) for place in range(len(rows)))


def test_figures_that_are_not_numbers_hold_nowhere(figures) -> None:
    run = figures.published_run[0]
    assert replace(run, losses=(math.nan,) * len(run.losses)).problems
    row = agreement.compared(figures.agreement)[-1]
    assert replace(row, run=replace(row.run, losses=(math.nan,) * agreement.STEPS)).problem


@pytest.mark.parametrize("way", [way for way in agreement.WAYS if way != agreement.REFERENCE])
def test_one_loss_beyond_the_limit_breaks_its_row(figures, way: str) -> None:
    row, _ = [row for row in agreement.compared(figures.agreement) if row.run.way == way]
    losses = list(row.run.losses)
    losses[30] = row.reference.losses[30] + 1.1 * row.way.limit
    broken = replace(row, run=replace(row.run, losses=tuple(losses)))
    assert broken.problem is not None
    assert "the loss of step 31" in broken.problem


def test_a_loss_below_the_floor_by_more_than_noise_is_a_violation(figures) -> None:
    run = figures.published_run[1]
    low = published_run.FLOOR - 1.5 * run.noise
    assert "below ln 512" in replace(run, losses=(*run.losses[:-5], low, *run.losses[-4:])).problems[0]


def test_one_file_or_one_loss_that_differs_is_not_bitwise_equal(figures) -> None:
    resume = figures.bitwise_resume[0]
    assert replace(resume, different=("optimizer.safetensors",)).problem is not None


def test_a_resume_from_nothing_proves_nothing(figures) -> None:
    assert replace(figures.bitwise_resume[0], resumed_from=0).problem is not None


def test_the_moments_are_in_every_phase_of_every_strategy() -> None:
    moments = bitwise_resume.moments()
    assert len(moments) == 20
    every = {(strategy, phase) for strategy in bitwise_resume.STRATEGIES for phase in bitwise_resume.PHASES}
    assert {(moment.strategy, moment.phase) for moment in moments} == every
    assert moments == bitwise_resume.moments()


@pytest.mark.parametrize("fault", ["lost", "repeated", "rate"])
def test_a_sample_lost_or_repeated_or_another_learning_rate_breaks_an_elastic_run(figures, fault: str) -> None:
    row = figures.elastic[0]
    assert isinstance(row, elastic.Resized)
    killed, samples = row.run, list(row.run.samples)
    if fault == "rate":
        killed = replace(killed, rates=(*killed.rates[:-1], math.nextafter(killed.rates[-1], 1)))
    else:
        samples[20] = samples[20][1:] if fault == "lost" else (*samples[20], samples[20][0])
        killed = replace(killed, samples=tuple(samples))
    assert replace(row, run=killed).problem is not None
