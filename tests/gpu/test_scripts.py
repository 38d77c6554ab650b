"""Scripts on transformers, Lightning and Accelerate, untouched and integrated, on two pods with NCCL."""

from __future__ import annotations

import json

import pytest
from tests.gpu.conftest import ROOT, Train

from ddpjob_operator.api.status import Phase

LIBRARIES = ("transformers", "lightning", "accelerate")
ON_THE_GPU = (
    ("use_cpu=True,", ""),
    ('accelerator="cpu",', 'accelerator="gpu",'),
    ("Accelerator(cpu=True)", "Accelerator()"),
    ("inputs = torch.rand(8, 4)", "inputs = torch.rand(8, 4).to(accelerator.device)"),
    ("STEPS, STEP_SECONDS = 40, 0.5", "STEPS, STEP_SECONDS = 40, 0.1"),
)


def on_the_gpu(path: str) -> str:
    text = (ROOT / path).read_text()
    for cpu, gpu in ON_THE_GPU:
        text = text.replace(cpu, gpu)
    return text


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_untouched_script_succeeds_and_is_seen(train: Train, library: str) -> None:
    done = train({"nodes": 2}, script=on_the_gpu(f"tests/fixtures/untouched/{library}.py"))
    assert (done.status.phase, done.status.restarts) == (Phase.SUCCEEDED, 0), done.output()
    progress = done.status.progress
    assert progress is not None
    assert progress.step == json.loads((done.shared / "done-0.json").read_text())["steps"]
    assert progress.loss is not None
    assert progress.samples_per_second is not None


def test_the_smallest_script_runs_as_it_is(train: Train) -> None:
    done = train({"nodes": 2}, script=(ROOT / "tests/fixtures/tutorials/smallest.py").read_text())
    assert done.status.phase is Phase.SUCCEEDED, done.output()
    assert done.output().count("| cuda") == 10  # local rank 0 of both pods


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_integrated_script_that_loses_a_rank_ends_with_the_same_losses(train: Train, library: str) -> None:
    script = on_the_gpu(f"tests/trainer/integrations/with_{library}.py")
    every = "1epochs" if library == "lightning" else "4steps"
    spec = {"nodes": 2, "snapshots": {"every": every, "keep": 2}, "env": [{"name": "PACE", "value": "0.2"}]}
    whole = train(spec, script=script)
    killed = train(spec, script=script, chaos="kill-rank@60%")
    assert (whole.status.restarts, killed.status.restarts) == (0, 1), killed.output()
    assert killed.status.phase is Phase.SUCCEEDED
    of_whole, of_killed = [
        {step: values for step, *values in map(json.loads, (done.shared / "losses.jsonl").read_text().splitlines())}
        for done in (whole, killed)
    ]
    assert of_killed == of_whole
