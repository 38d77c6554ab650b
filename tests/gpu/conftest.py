"""Whole jobs on a real GPU. One is enough: two pods share it (shared/sitecustomize.py)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import local_run
from tests.support.local_run import PACKAGES, ROOT, environment, new_job

from ddp_trainer.logs.losses import read_losses
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.local.volume import open_shared

HERE = Path(__file__).parent
IMPORTED_FROM = (
    HERE / "shared",
    *PACKAGES,
    HERE,
    ROOT / "tests/trainer/train",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(240))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and `make test-gpu`"))


@dataclass(frozen=True)
class Done:
    """What is left of a job."""

    status: DDPJobStatus
    shared: Path
    name: str

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in read_losses(self.shared / "logs" / self.name)}

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.shared / "logs" / self.name / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def output(self) -> str:
        """What all pods printed."""
        logs = self.shared / "logs" / self.name / "pods"
        return "\n".join(log.read_text(errors="replace") for log in sorted(logs.glob("*.log")))

    def final_files(self) -> dict[str, bytes]:
        newest = max((self.shared / "checkpoints" / self.name).glob("step-*"))
        return {path.name: path.read_bytes() for path in newest.glob("*.safetensors") if path.name != "rng.safetensors"}


Train = Callable[..., Done]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Run a job to its end in a folder of its own, or in that of `after`, an earlier run of the same job."""

    def run(
        spec: dict[str, Any],
        *,
        chaos: str | None = None,
        name: str = "job",
        script: str = "",
        after: Done | None = None,
    ) -> Done:
        shared = after.shared if after is not None else open_shared(tmp_path_factory.mktemp(name) / "shared")
        if script:
            (shared / "train.py").write_text(script)
            spec = {"entrypoint": {"script": "/mnt/shared/train.py"}, **spec}
        # every pod would get a GPU of its own, or none
        shared_gpu = {"name": "CUDA_VISIBLE_DEVICES", "value": "0"}
        whole = {"restart": {"backoff": {"initialSeconds": 0}}, "snapshots": {"every": "100steps"}, **spec}
        whole["env"] = [shared_gpu, *spec.get("env", [])]
        environ = environment(IMPORTED_FROM)
        outcome = asyncio.run(local_run.run(new_job(name, whole), shared, chaos=chaos, environ=environ))
        return Done(outcome.status, shared, name)

    return run
