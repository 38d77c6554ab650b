"""A job as a run on this machine takes it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.local.environment import Machine
from ddpjob_operator.local.machine import as_run_here, different_here, missing_here, program_in_words, this_machine
from ddpjob_operator.local.script_paths import written_in

SECRET = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}


def job(**spec: Any) -> Job:
    created = datetime(2026, 1, 2, tzinfo=UTC)
    return Job("digits", "default", "uid", 1, created, DDPJobSpec.model_validate(spec), DDPJobStatus())


def test_a_run_on_this_machine_is_neither_suspended_nor_deleted_after_its_end() -> None:
    spec = as_run_here(job(suspend=True, ttlSecondsAfterFinished=0, nodes=2)).spec
    assert (spec.suspend, spec.ttl_seconds_after_finished, spec.nodes) == (False, None, 2)


def test_a_machine_that_is_not_linux_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python on macOS has no os.sched_getaffinity: `ddpjob run` ended with a traceback."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(sys, "platform", "darwin")
    machine = this_machine(tmp_path)
    assert machine.cores >= 1
    (said,) = missing_here(job(), machine)
    assert said.startswith("ddpjob run needs Linux, and this is darwin; run it in a Linux container")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_the_cores_of_a_container_are_those_of_its_quota(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("ddpjob_operator.local.machine.CGROUP", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert this_machine(tmp_path).cores == cores


@pytest.mark.parametrize("suspend", [True, False])
def test_whoever_runs_a_suspended_job_is_told_that_it_runs_all_the_same(suspend: bool, tmp_path: Path) -> None:
    notes = different_here(job(suspend=suspend), this_machine(tmp_path))
    assert any("spec.suspend" in note for note in notes) is suspend


def test_a_shell_script_of_a_job_is_announced(tmp_path: Path) -> None:
    both = [
        {"name": "code", "path": "code", "script": "git clone https://example.com/code.git code\nrm -rf ~/old"},
        {"name": "data", "path": "data", "source": "https://example.com/data.tar"},
    ]
    assert different_here(job(initializers=both), replace(this_machine(tmp_path), environ={})) == (
        "initializer code runs a shell script on this machine, as you: git clone https://example.com/code.git code "
        "… (2 lines)",
    )


def test_keys_of_the_shell_that_the_ranks_do_not_get_are_announced(tmp_path: Path) -> None:
    shell = {"WANDB_API_KEY": "k", "HF_TOKEN": "t", "HF_HOME": "/hub", "SSH_AUTH_SOCK": "s"}
    machine = replace(this_machine(tmp_path), environ=shell)
    assert different_here(job(), machine) == (
        "not passed on from this shell: HF_TOKEN, WANDB_API_KEY; --env HF_TOKEN passes one on",
    )
    named = [{"name": name, "value": "v"} for name in shell]
    assert different_here(job(env=named), machine) == ()


@pytest.mark.parametrize(("requirements", "noted"), [("requirements.txt", True), (None, False)])
def test_an_index_of_the_shell_that_pip_does_not_get_is_announced(
    requirements: str | None, noted: bool, tmp_path: Path
) -> None:
    shell = {"PIP_EXTRA_INDEX_URL": "https://pip.example/simple", "PIP_NO_COLOR": "1"}
    code = {"configMaps": ["ddpjob-code-0"], "sha256": "0" * 64, "requirements": requirements}
    notes = different_here(
        job(code=code, entrypoint={"script": "train.py"}), replace(this_machine(tmp_path), environ=shell, gpus=())
    )
    said = "not passed on from this shell: PIP_EXTRA_INDEX_URL; --env PIP_EXTRA_INDEX_URL passes one on"
    assert notes == ((said,) if noted else ())


@pytest.mark.parametrize(("gpus", "asked", "noted"), [((), 2, True), ((), 0, False), (("0", "1"), 2, False)])
def test_that_there_is_no_gpu_is_announced(gpus: tuple[str, ...], asked: int, noted: bool, tmp_path: Path) -> None:
    machine = replace(this_machine(tmp_path), environ={}, gpus=gpus)
    limits = {"limits": {"nvidia.com/gpu": asked}} if asked else {}
    notes = different_here(job(resources=limits, procsPerNode=2), machine)
    assert notes == (("this machine has no GPU for the ranks: training runs on the CPU",) if noted else ())


@pytest.mark.parametrize(
    ("chosen", "gpus"),
    [
        ("4, 7", ("4", "7")),
        ("GPU-8932f937,MIG-1a2b", ("GPU-8932f937", "MIG-1a2b")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        ("NoDevFiles", ()),
    ],
)
def test_gpus_are_those_that_cuda_sees(
    chosen: str, gpus: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert this_machine(tmp_path).gpus == gpus


@pytest.mark.parametrize(
    ("files", "driver", "fails", "gpus"),
    [
        (("dxg",), True, 0, ("0", "1")),
        (("dxg",), True, 9, ()),
        (("dxg",), False, 0, ()),
        ((), True, 0, ()),
        (("nvidia0", "nvidiactl", "nvidia-uvm"), True, 0, ("0",)),
    ],
)
def test_gpus_of_windows_are_those_that_nvidias_library_counts(
    files: tuple[str, ...],
    driver: bool,
    fails: int,
    gpus: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """WSL 2 has no device file for each."""

    def count_devices(count: Any) -> int:
        count._obj.value = 2
        return fails

    def load(name: str) -> SimpleNamespace:
        if not driver:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlDeviceGetCount_v2=count_devices)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("ddpjob_operator.local.machine.DEVICES", tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", load)
    for name in files:
        (tmp_path / name).touch()
    assert this_machine(tmp_path).gpus == gpus


def amd_machine(folder: Path, monkeypatch: pytest.MonkeyPatch, hip: str = "'6.4.43482-0f2d60242'") -> None:
    """A processor and three GPUs, of which a container has two; `hip` is what torch says that it is built for."""
    torch, devices, nodes = folder / "torch", folder / "dev", folder / "nodes"
    for directory in (torch, devices / "dri", *(nodes / str(index) for index in range(4))):
        directory.mkdir(parents=True)
    (torch / "version.py").write_text(f"cuda: Optional[str] = None\nhip: Optional[str] = {hip}\n")
    for index, minor in enumerate((0, 128, 129, 130)):
        (nodes / str(index) / "properties").write_text(f"simd_count 4\ndrm_render_minor {minor}\nvendor_id 4098\n")
    for name in ("kfd", "dri/renderD128", "dri/renderD130", "dri/renderD131"):
        (devices / name).touch()
    monkeypatch.setattr("ddpjob_operator.local.machine.DEVICES", devices)
    monkeypatch.setattr("ddpjob_operator.local.machine.AMD_NODES", nodes)
    found = SimpleNamespace(origin=str(torch / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    for name in ("CUDA", "HIP", "ROCR"):
        monkeypatch.delenv(f"{name}_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("chosen", "gpus"),
    [
        ({}, ("0", "1")),
        ({"HIP": "1"}, ("1",)),
        ({"HIP": "0", "CUDA": "0,1"}, ("0",)),
        ({"CUDA": "0,1"}, ("0", "1")),
        ({"ROCR": "2,GPU-4b2c1a9f"}, ("0", "1")),
        ({"ROCR": "1,2", "HIP": "1"}, ("1",)),
        ({"HIP": ""}, ()),
        ({"ROCR": ""}, ()),
    ],
)
def test_gpus_of_amd_are_those_that_hip_sees(
    chosen: dict[str, str], gpus: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    amd_machine(tmp_path, monkeypatch)
    for name, value in chosen.items():
        monkeypatch.setenv(f"{name}_VISIBLE_DEVICES", value)
    machine = this_machine(tmp_path)
    assert machine.rocm
    assert machine.gpus == gpus


def test_gpus_of_amd_are_none_for_another_torch_or_without_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    amd_machine(tmp_path / "cpu", monkeypatch, hip="None")
    machine = this_machine(tmp_path)
    assert (machine.rocm, machine.gpus) == (False, ())
    amd_machine(tmp_path / "hip", monkeypatch)
    (tmp_path / "hip" / "dev" / "kfd").unlink()
    machine = this_machine(tmp_path)
    assert (machine.rocm, machine.gpus) == (True, ())


def test_fewer_gpus_than_a_rank_asks_for_are_announced(tmp_path: Path) -> None:
    machine = replace(this_machine(tmp_path), environ={}, gpus=("0", "1"))
    notes = different_here(job(resources={"limits": {"nvidia.com/gpu": 4}}, procsPerNode=1), machine)
    assert notes == ("2 GPU(s) where the job asks for 4: a pod gets fewer than it would have",)


def test_what_each_rank_runs_is_announced_in_one_line() -> None:
    assert program_in_words(job()) == "python -m ddp_trainer.train"
    script = job(entrypoint={"script": "/mnt/shared/train.py"}, args=["--name", "a b\n\x1b[2J", "x" * 300])
    words = program_in_words(script)
    assert words.startswith("python /mnt/shared/train.py --name 'a b[2J' xxx")
    assert len(words) <= 201


def missing(shared: Path, environ: dict[str, str], **spec: Any) -> tuple[str, ...]:
    return missing_here(job(**spec), Machine(host="laptop", shared=shared, environ=environ, cores=2))


def test_a_claim_to_copy_from_needs_a_cluster(tmp_path: Path) -> None:
    (problem,) = missing(
        tmp_path, {}, initializers=[{"name": "images", "source": "pvc://imagenet/train", "path": "datasets/train"}]
    )
    assert problem == (
        "spec.initializers images: the claim imagenet is in a cluster, and there is none here; "
        f"put a copy at {tmp_path}/datasets/train and remove the initializer"
    )


@pytest.mark.parametrize(("environ", "problems"), [({}, 1), ({"HF_TOKEN": "hf_x"}, 0)])
def test_credentials_of_an_initializer_come_from_the_shell(
    tmp_path: Path, environ: dict[str, str], problems: int
) -> None:
    hub = {"name": "weights", "source": "hf://openai/whisper", "path": "models/whisper", "env": [SECRET]}
    found = missing(tmp_path, environ, initializers=[hub])
    assert len(found) == problems
    assert all("spec.initializers weights: " in problem and "export HF_TOKEN=" in problem for problem in found)


@pytest.mark.parametrize(
    ("folder", "script", "refused"),
    [
        ("data new/shared", "rm -rf /mnt/shared/datasets/x && fetch", True),
        ("ann's", "cd '/mnt/shared/datasets'", True),
        ("a$b", "ls /mnt/shared", True),
        ("data new/shared", 'rm -rf "$DDPJOB_SHARED/datasets/x"', False),
        ("grün/shared-2", "rm -rf /mnt/shared/datasets/x", False),
    ],
)
def test_a_folder_that_a_shell_takes_apart_is_not_put_into_a_script(
    tmp_path: Path, folder: str, script: str, refused: bool
) -> None:
    found = missing(tmp_path / folder, {}, initializers=[{"name": "x", "path": "datasets/x", "script": script}])
    assert len(found) == refused
    assert all(f"x: its script names /mnt/shared, for which {tmp_path / folder} stands," in line for line in found)


def test_a_script_that_an_initializer_may_bring_is_not_missed(tmp_path: Path) -> None:
    entrypoint = {"script": "/mnt/shared/code/train.py"}
    clone = {"name": "code", "path": "code", "script": "git clone https://example.com/code.git code"}
    assert "there is no such file" in missing(tmp_path, {}, entrypoint=entrypoint)[0]
    assert missing(tmp_path, {}, entrypoint=entrypoint, initializers=[clone]) == ()


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (
            'torch.save(state, "/mnt/shared/checkpoints/model.pt")',
            "line 1 of .* names /mnt/shared/checkpoints/model",
        ),
        ('"""Reads\n/mnt/shared."""\nroot = "/mnt/shared"', "line 3 of .* names /mnt/shared, .*DDPJOB_SHARED"),
        ("save(f'/mnt/shared/{name}')", "names /mnt/shared/,"),
        ('parser.add_argument("--data", default="/mnt/shared/datasets")', None),
        ('root = os.environ.get("DDPJOB_SHARED", "/mnt/shared")', None),
        ('"""Its data is in /mnt/shared/datasets."""', None),
        ('open("/mnt/shared-with-others")', None),
        ("this is not Python", None),
        ("total = " + " + ".join(["1"] * 1_200), None),
        pytest.param(f"total = {'-' * 100_000}1", None, id="the parser's own stack overflows"),
    ],
)
def test_a_script_that_has_the_volumes_path_in_its_text_is_refused_where_it_means_nothing(
    tmp_path: Path, text: str, refused: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    found = missing(tmp_path, {}, entrypoint={"script": str(script)})
    assert [bool(re.search(refused, problem)) for problem in found] == [True] if refused else found == ()


def test_the_volumes_path_means_something_where_it_leads_to_the_shared_folder(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('open("/mnt/shared/datasets/x")')
    mount = tmp_path / "mount"
    assert written_in(script, mount, tmp_path) == (1, "/mnt/shared/datasets/x")
    mount.symlink_to(tmp_path)
    assert written_in(script, mount, tmp_path) is None
