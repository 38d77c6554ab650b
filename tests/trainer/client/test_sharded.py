"""`attach` with a model that is split among the ranks (FSDP2): saved in parts, and resumed with the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer.train.volume import Volume


def test_a_sharded_model_with_an_unused_parameter_resumes_with_one_rank_then_with_two_to_the_same_losses(
    job: Volume, tmp_path: Path
) -> None:
    unbroken = Volume(tmp_path / "unbroken", here=job.here).trained(2, "own_fsdp2.py").losses()
    assert job.train(2, "own_fsdp2.py", DIES_AT="5", DDPJOB_SNAPSHOT_EVERY="3steps").returncode != 0
    assert job.snapshot_steps() == [3]
    assert job.train(1, "own_fsdp2.py", DIES_AT="8", DDPJOB_SNAPSHOT_EVERY="3steps", DDPJOB_ATTEMPT="1").returncode != 0
    job.trained(2, "own_fsdp2.py", DDPJOB_SNAPSHOT_EVERY="3steps", DDPJOB_ATTEMPT="2")
    assert [event["step"] for event in job.events("resumed")] == [3, 6]
    assert job.losses() == pytest.approx(unbroken)
    assert len(unbroken) == 10
