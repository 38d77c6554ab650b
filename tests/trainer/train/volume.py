"""Runs of the real trainer under the real torchrun, on gloo, each with a volume of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.forked import start as forked

from ddp_trainer.logs.losses import read_losses

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@dataclass(frozen=True)
class Volume:
    """A job's place on the volume, and the runs that use it."""

    root: Path
    job: str = "job"
    here: Path = HERE
    fresh: bool = False
    """Start new processes, which import torch first, instead of forked ones."""
    imported: tuple[str, ...] = ()
    """What forked processes have imported besides torch."""

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    def environment(self, **extra: str) -> dict[str, str]:
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'trainer_image'}:{self.here}",
            "DDPJOB_SHARED": str(self.root / "shared"),
            "DDPJOB_NAME": self.job,
            "DDPJOB_UID": "uid",
            "DDPJOB_CREATED": "1",
            "DDPJOB_ATTEMPT": "0",
            "DDPJOB_RUN_DIR": str(self.run_dir),
            "DDPJOB_SNAPSHOT_EVERY": "7steps",
            **extra,
        }

    def command(self, ranks: int, arguments: tuple[str, ...]) -> list[str]:
        if arguments and arguments[0].endswith(".py"):
            target = [str(self.here / arguments[0]), *arguments[1:]]
        elif arguments and arguments[0] == "-m":
            target = list(arguments)
        else:
            target = ["-m", "ddp_trainer.train", *arguments]
        if not self.fresh:
            return forked.command(ranks, *target, imported=self.imported)
        started = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        return [sys.executable, *started, *target]

    def start(self, ranks: int, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start training with so many ranks under torchrun, or (0) without it."""
        return subprocess.Popen(
            self.command(ranks, arguments),
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def train(self, ranks: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Train until it ends. Fails the test at the deadline."""
        return finish(self.start(ranks, *arguments, **environment))

    def trained(self, ranks: int, *arguments: str, **environment: str) -> Volume:
        """Train, to the end."""
        done = self.train(ranks, *arguments, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return self

    @property
    def logs(self) -> Path:
        return self.root / "shared" / "logs" / self.job

    @property
    def checkpoints(self) -> Path:
        return self.root / "shared" / "checkpoints" / self.job

    def losses(self) -> dict[int, float]:
        """The loss of each step, as all attempts together have it."""
        return {line["step"]: line["loss"] for line in read_losses(self.logs)}

    def script_losses(self) -> dict[int, Any]:
        """What a script of its own wrote to losses.jsonl, by step; of a step that was computed again, the last."""
        lines = (self.root / "shared" / "losses.jsonl").read_text().splitlines()
        return {step: values for step, *values in map(json.loads, lines)}

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.logs / "events.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == kind]

    def beats(self) -> list[dict[str, Any]]:
        """The heartbeats of all ranks."""
        return [json.loads(path.read_text()) for path in (self.run_dir / "heartbeats").glob("rank-*.json")]

    def snapshot_steps(self) -> list[int]:
        return sorted(
            int(path.name.removeprefix("step-"))
            for path in self.checkpoints.glob("step-*")
            if path.name.removeprefix("step-").isdigit()
        )

    def checkpoint_steps(self) -> list[int]:
        """Steps of the verified checkpoints that scripts wrote themselves."""
        return sorted(int(path.name[-12:]) for path in self.checkpoints.glob("checkpoint-????????????"))

    def newest_manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.newest / "manifest.json").read_text()))

    @property
    def newest(self) -> Path:
        return self.checkpoints / f"step-{self.snapshot_steps()[-1]:012d}"

    def assert_same_end(self, other: Volume) -> None:
        """The same losses in every step, and the same bits in every tensor of the newest snapshot."""
        assert self.losses() == other.losses()
        own, others = self.newest_tensors(), other.newest_tensors()
        assert own.keys() == others.keys()
        assert any(name.startswith(("optimizer/", "rank-")) for name in own), sorted(own)
        assert [name for name in own if not torch.equal(own[name], others[name])] == []

    def newest_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the newest snapshot, by file and name, except the random number generators'."""
        from safetensors.torch import load_file

        return {
            f"{file.stem}/{name}": tensor
            for file in self.newest.rglob("*.safetensors")
            if file.stem != "rng"
            for name, tensor in load_file(file).items()
        }


def finish(process: subprocess.Popen[str], seconds: float = PATIENCE_SECONDS) -> subprocess.CompletedProcess[str]:
    """Wait for the end, but not beyond the deadline. Ends what torchrun started, whatever happens here."""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
