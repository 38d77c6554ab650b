"""docs/bring-your-script.md is run as it stands: every script before and after, on the libraries that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.starting import starts_processes
from tests.trainer.documented import ROOT, blocks
from tests.trainer.forked.start import LIBRARIES
from tests.trainer.train.volume import Volume

from ddp_trainer.snapshots.trust.store import SnapshotStore

PAGE = (ROOT / "docs" / "bring-your-script.md").read_text()
DIFFS = {re.match(r" # (\S+)\.py\n", block.text)[1]: block.text for block in blocks(PAGE) if block.language == "diff"}  # type: ignore[index]
(WORK,) = (block.text for block in blocks(PAGE) if block.text.startswith("# work.py"))

ONE_RANK = ("with_transformers", "with_lightning")
"""They take as many devices as there are, and a CPU is one; with two ranks: tests/trainer/integrations."""


def lines(diff: str, sign: str) -> str:
    """The script that has the lines with this sign, and those with none."""
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in ("", " ", sign))


@pytest.fixture
@starts_processes
def job(tmp_path: Path) -> Volume:
    (tmp_path / "work.py").write_text(WORK)
    return Volume(tmp_path, here=tmp_path, imported=LIBRARIES)


@pytest.mark.parametrize("name", DIFFS)
def test_the_script_runs_before_as_in_a_job_and_afterwards_has_snapshots_or_checkpoints_that_verify(
    job: Volume, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 1 if name in ONE_RANK else 2
    monkeypatch.chdir(job.root)
    (job.root / "before.py").write_text(lines(DIFFS[name], "-"))
    (job.root / "after.py").write_text(lines(DIFFS[name], "+"))
    job.trained(1, "-m", "ddp_trainer.rank.worker", "script", str(job.root / "before.py"))
    assert not job.checkpoints.exists()
    job.trained(ranks, "after.py", DDPJOB_SNAPSHOT_EVERY="2steps")
    stores = [SnapshotStore(job.checkpoints, keep=1, fence=None, series=series) for series in ("step", "checkpoint")]
    verified = [store.verify(step).step for store in stores for step in store.steps()]
    assert verified
    assert max(verified) <= 32
    job.trained(ranks, "after.py", DDPJOB_SNAPSHOT_EVERY="2steps", DDPJOB_ATTEMPT="1")
    assert [event["step"] for event in job.events("resumed")] == [max(verified)]


@pytest.mark.parametrize("name", ["own_files", "with_dcp", "with_accelerate"])
def test_a_script_that_saves_itself_saves_its_last_step_before_any_save_is_due(
    job: Volume, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.root)
    (job.root / "after.py").write_text(lines(DIFFS[name], "+"))
    job.trained(2, "after.py", DDPJOB_SNAPSHOT_EVERY="1000steps")
    store = SnapshotStore(job.checkpoints, keep=1, fence=None, series="checkpoint")
    assert [store.verify(step).step for step in store.steps()] == [20]


def test_the_page_shows_a_script_for_each_way() -> None:
    libraries = ["with_transformers", "with_lightning", "with_accelerate"]
    assert list(DIFFS) == ["train", "recovers", "own_files", "with_dcp", *libraries]
