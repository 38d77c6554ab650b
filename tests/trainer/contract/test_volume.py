"""The part of the contract's environment that reaches the snapshots (docs/contracts.md sections 2 and 6)."""

from pathlib import Path

from ddp_trainer.contract import environment as trainer_environment
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.schedule import SaveInterval
from ddp_trainer.snapshots.session import Snapshots
from ddpjob_operator.core.manifests.pod_environment import Place, environment
from ddpjob_operator.core.values.observed import ServiceView
from ddpjob_operator.wire.jobs import parse_job


def test_the_snapshots_lie_where_the_operators_environment_says(tmp_path: Path) -> None:
    metadata = {"name": "digits", "uid": "0b0c", "creationTimestamp": "2025-11-21T05:46:40Z"}
    job = parse_job({"metadata": metadata, "spec": {"snapshots": {"every": "7epochs", "keep": 5}}})
    listed = environment(job, Place(3, 0, ServiceView(host="10.96.0.7", attempt=3)))
    env = {entry["name"]: entry["value"] for entry in listed if "value" in entry} | {"DDPJOB_SHARED": str(tmp_path)}
    read = trainer_environment.parse_job(env, default_name="training")
    snapshots = Snapshots.of_job({}, read, World(), strategy="single", global_batch=1)
    assert snapshots.resume() is None
    tokens = tmp_path / "checkpoints" / "digits" / "attempts"
    assert [token.name for token in tokens.iterdir()] == ["001763704000-000003-0b0c"]
    assert SaveInterval.parse(read.snapshot_every) == SaveInterval.parse("7epochs")
    assert read.snapshot_keep == 5
