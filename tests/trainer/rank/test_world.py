"""Which device a rank trains on, and what is said where that is not the one that its pod was given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_trainer import doctor
from ddp_trainer.rank import world
from ddp_trainer.rank.world import describe_world, gpus_present


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device files of a container that was given two GPUs, with a torch that sees none."""
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(world, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_present_unless_they_are_hidden(environ: dict[str, str], count: int) -> None:
    assert gpus_present(environ) == count


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 2),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, 2),
        ({"HIP_VISIBLE_DEVICES": "-1"}, 0),
        ({"ROCR_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_gpus_that_only_a_group_of_the_node_may_open_are_present(
    environ: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD's: without that group ROCm finds none, and training would go on on the CPU without a word."""
    (tmp_path / "dri").mkdir()
    for name in ("kfd", "dri/renderD128", "dri/renderD129", "dri/card0"):
        (tmp_path / name).touch()
    monkeypatch.setattr(world, "DEVICES", tmp_path)
    assert gpus_present(environ) == 0, "a torch without ROCm has no use for them"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpus_present(environ) == count
    assert "supplementalGroups" in world.why_unseen()
    (tmp_path / "kfd").unlink()
    assert "is built without CUDA" in world.why_unseen(), "the GPUs are NVIDIA's"


@pytest.mark.parametrize(
    ("built_for", "why"),
    [(None, "is built without CUDA: use the trainer image with CUDA"), ("13.0", "CUDA 13.0 does not start on them")],
)
@pytest.mark.usefixtures("two_gpus")
def test_training_on_the_cpu_of_a_pod_with_gpus_is_said(
    built_for: str | None, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert describe_world({"LOCAL_RANK": "0"}).device.type == "cpu"
    said = capsys.readouterr().err
    assert "training runs on the CPU: this node has 2 GPU(s), and " in said
    assert why in said


@pytest.mark.usefixtures("two_gpus")
def test_one_rank_of_a_node_says_so_and_none_that_was_to_take_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    describe_world({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    describe_world({}, device="cpu")
    describe_world({"CUDA_VISIBLE_DEVICES": ""})
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("two_gpus")
def test_the_doctor_finds_gpus_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (found,) = [str(finding) for finding in doctor.node() if "GPUs" in finding.what]
    assert found.startswith("FAIL ")
    assert "2 are there, and torch sees none" in found
