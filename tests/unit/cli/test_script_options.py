"""Each option of a script that `ddpjob submit` and `ddpjob run` have is in the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ddpjob_operator.cli import run as run_module
from ddpjob_operator.cli.main import app
from ddpjob_operator.local.output import Logs
from ddpjob_operator.submit.job import Submission

OPTIONS = (
    "train.py", "--name", "mine", "--nodes", "3", "--gpus", "8", "--procs-per-node", "4", "--image", "i:1",
    "--claim", "data", "-e", "A=b", "--requirements", "r.txt", "--fresh", "--", "--lr", "0.1",
)  # fmt: skip
SPEC: dict[str, Any] = {
    "nodes": 3,
    "entrypoint": {"script": "train.py"},
    "args": ["--lr", "0.1"],
    "image": "i:1",
    "procsPerNode": 4,
    "resources": {"limits": {"nvidia.com/gpu": 8}},
    "env": [{"name": "A", "value": "b"}],
    "shared": {"claimName": "data"},
    "snapshots": {"resume": "Own"},
}


@pytest.fixture
def _in_a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)")
    (tmp_path / "r.txt").write_text("tqdm")


pytestmark = pytest.mark.usefixtures("_in_a_folder_with_a_script")


def test_a_dry_run_of_submit_prints_a_job_with_all_of_them() -> None:
    options = ["--dry-run", "--link", "wandb=https://wandb.ai/x", "--owner", "ada", *OPTIONS]
    done = CliRunner().invoke(app, ["submit", *options])
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(done.stdout) == {
        "apiVersion": "training.ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "metadata": {
            "name": "mine",
            "annotations": {
                "links.training.ddpjob.io/wandb": "https://wandb.ai/x",
                "training.ddpjob.io/owner": "ada",
            },
        },
        "spec": {**SPEC, "code": {"path": ".", "requirements": "r.txt"}},
    }


def test_run_begins_a_job_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    def run(submission: Submission, *options: Any) -> int:
        begun.append((submission.content, *options))
        return 7

    monkeypatch.setattr(run_module, "run", run)
    done = CliRunner().invoke(
        app, ["run", "--shared", "volume", "--chaos", "kill-rank@3steps", "--logs", "all", *OPTIONS]
    )
    assert done.exit_code == 7, done.output
    ((content, *options),) = begun
    assert options == [Path("volume"), "kill-rank@3steps", Logs.ALL]
    assert content["metadata"] == {"name": "mine"}
    assert content["spec"].pop("code")["requirements"] == "r.txt"
    assert content["spec"] == SPEC
