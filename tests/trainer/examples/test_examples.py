"""docs/trainer.md is run as it stands: every block, the output that it shows, and the links of its table."""

from __future__ import annotations

import re

import pytest
from tests.support.starting import starts_processes
from tests.trainer.documented import PAGE, pattern
from tests.trainer.examples import settings
from tests.trainer.examples.workbook import Workbook, examples

from ddp_trainer.logs.losses import read_losses

NAMES = [example.name for example in examples()]
TABLE = re.findall(
    r"^\| (?P<what>.+?) \| (?P<flag>.+?) \| (?P<example>\[.+?) \| (?P<tests>\[.+?) \|$", PAGE.read_text(), re.M
)


@pytest.fixture(scope="module")
@starts_processes
def workbook(tmp_path_factory: pytest.TempPathFactory) -> Workbook:
    """The page, worked through."""
    workbook = Workbook(tmp_path_factory.mktemp("try"))
    workbook.work_through()
    return workbook


def test_headings_of_examples_are_told_apart() -> None:
    assert len(set(NAMES)) == len(NAMES) > 30


@pytest.mark.parametrize("name", NAMES)
def test_the_example_does_what_the_page_shows(workbook: Workbook, name: str) -> None:
    (example,) = (example for example in workbook.examples if example.name == name)
    if example.lacks is not None:
        pytest.skip(f"this example needs {example.lacks}")
    assert example.code == example.exits, example.output
    missing = [line for line in example.shown if not pattern(line).search(example.output)]
    assert missing == [], example.output
    if example.exits == 0:
        assert example.output.count("finished after") >= len(example.runs), example.output


def test_tensorboard_and_the_loss_log_hold_the_curves_of_the_run(workbook: Workbook) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(workbook.folder / "shared/logs/logged/tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("train/loss")] == [5, 10, 15, 20]
    assert {"train/learning_rate", "train/samples_per_second"} <= set(events.Tags()["scalars"])
    assert len(read_losses(workbook.folder / "shared/logs/logged")) == 20


def test_the_settings_of_a_run_are_in_its_first_event(workbook: Workbook) -> None:
    first = (workbook.folder / "shared/logs/configured/events.jsonl").read_text().splitlines()[0]
    assert '"lr": 0.003' in first, "a flag wins over the file"
    assert '"warmup_steps": 5' in first, "the file wins over the default"


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_each_row_of_the_table_leads_to_examples_and_to_tests(row: tuple[str, ...]) -> None:
    _, _, shown, tested = row
    headings = {_anchor(example.block.heading): example for example in examples()}
    for anchor in re.findall(r"\]\(#(.+?)\)", shown):
        assert anchor in headings, f"no example stands under #{anchor}"
    for path in re.findall(r"\]\((.+?)\)", tested):
        file = (PAGE.parent / path).resolve()
        assert file.is_file(), path
        assert re.search(r"^(async )?def test_", file.read_text(), re.M), path


def test_the_table_has_a_row_for_every_flag_that_is_a_technique() -> None:
    text = "".join(row[1] for row in TABLE)
    from ddp_trainer.train.strategies import STRATEGIES

    assert [name for name in STRATEGIES if name not in text] == []
    assert len(TABLE) == 22


def test_the_settings_on_the_page_are_those_of_help() -> None:
    assert settings.on_page(PAGE.read_text()) == settings.table(), (
        "write them: python -m tests.trainer.examples.settings"
    )


def _anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
