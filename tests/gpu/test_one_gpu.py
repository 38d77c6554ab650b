"""One rank on a GPU: its faults, and the same bits after a restart."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.benchmarks.bench_snapshots import Training
from tests.gpu.conftest import HERE, Train
from tests.support.waiting import eventually
from tests.trainer.train.volume import Volume

from ddp_trainer.launch.status.host import GPUs
from ddp_trainer.snapshots.codec import rng
from ddp_trainer.snapshots.codec.tensorfile import Buffers, Memory
from ddp_trainer.snapshots.session import Progress, SnapshotEvent
from ddp_trainer.train.randomness import make_deterministic
from ddpjob_operator.api.status import Phase

LONG = ["--task", "digits", "--epochs", "40", "--micro-batch", "32"]
LM = ["--task", "tiny_lm", "--max-steps", "600", "--global-batch", "16", "--task-options", "dropout=0.1"]
CYCLES_OF_A_SECOND = 2 * 10**9
SETTINGS = {
    "fp32 with dropout and data workers": [*LM, "--workers", "2"],
    "bf16": [*LM, "--precision", "bf16"],
    "fp16 with skipped steps": [*LONG, "--precision", "fp16", "--scaler-init-scale", "1e8"],
    "compiled": [*LM, "--compile"],
}


@pytest.mark.parametrize("arguments", SETTINGS.values(), ids=SETTINGS)
def test_a_killed_run_ends_with_the_same_losses_and_weights(train: Train, arguments: list[str]) -> None:
    whole = train({"args": arguments})
    killed = train({"args": arguments}, chaos="kill-rank@50%")
    assert (whole.status.phase, whole.status.restarts) == (Phase.SUCCEEDED, 0)
    assert (killed.status.phase, killed.status.restarts) == (Phase.SUCCEEDED, 1)
    assert killed.events("resumed")[0]["step"] >= 100
    assert killed.losses() == whole.losses()
    assert killed.final_files() == whole.final_files()


def test_torch_reads_the_workspace_of_cublas_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    matrix = torch.rand(64, 64, device="cuda")
    try:
        make_deterministic(matrix.device)
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        torch.use_deterministic_algorithms(True)
        assert torch.equal(matrix @ matrix, matrix @ matrix)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_generators_of_the_device_are_restored() -> None:
    torch.cuda.init()
    state = rng.capture()
    first = torch.rand(8, device="cuda")
    rng.restore(state)
    assert torch.equal(torch.rand(8, device="cuda"), first)


def pinned_bytes() -> int:
    """What torch's own allocator has pinned; it has no statistics before its first allocation."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def test_buffers_pin_as_many_bytes_as_the_state_has_and_give_them_back() -> None:
    odd = (1 << 30) + 12345
    pinned_by_torch = pinned_bytes()
    memory = Memory(odd, pinned=True)
    assert memory.data.is_pinned()
    assert pinned_bytes() == pinned_by_torch
    memory.release()
    assert not memory.data.is_pinned()
    buffers = Buffers()
    for size in (1000, 3000):
        weight = torch.rand(size, device="cuda")
        _, data = buffers.copy("model", {"weight": weight})
        assert data.is_pinned()
        assert torch.equal(data.view(torch.float32), weight.cpu())


def test_the_stall_of_a_snapshot_leaves_out_the_steps_that_the_device_still_computes(tmp_path: Path) -> None:
    events: list[SnapshotEvent] = []
    training = Training(tmp_path, 50, attempt=0, device="cuda", on_event=events.append)
    training.snapshots.resume()
    for step in (1, 2):
        training.step()
        torch.cuda._sleep(CYCLES_OF_A_SECOND)
        assert training.snapshots.save(Progress(step, 0, step), wait=True)
    first, second = [event.stall_seconds for event in events if event.result == "saved"]
    assert second < 0.5, (first, second)


def test_a_batch_that_the_device_has_no_memory_for_is_halved_before_the_first_step(train: Train) -> None:
    done = train({"args": ["--task", "gpu_tasks:Hungry", "--max-steps", "20"]})
    assert (done.status.phase, done.status.restarts) == (Phase.SUCCEEDED, 0), done.output()
    assert len(done.losses()) == 20


@pytest.mark.parametrize(
    "options", [("where=validation",), ("where=training", "first=40")], ids=["in validation", "later"]
)
def test_memory_that_fails_later_costs_one_restart_with_half_the_batch(train: Train, options: tuple[str, ...]) -> None:
    given = [part for option in options for part in ("--task-options", option)]
    done = train({"args": ["--task", "gpu_tasks:Hungry", "--max-steps", "60", *given]})
    failure = done.status.last_failure
    assert (done.status.phase, failure and failure.reason) == (Phase.SUCCEEDED, "OutOfMemory"), done.output()
    assert failure is not None
    assert "CUDA out of memory" in failure.message
    assert len(done.losses()) == 60


def test_an_operation_without_a_deterministic_kernel_is_named_and_trained_with(train: Train) -> None:
    done = train({"args": ["--task", "gpu_tasks:WithoutDeterministicKernel", "--max-steps", "20"]})
    assert (done.status.phase, done.status.restarts) == (Phase.SUCCEEDED, 0), done.output()
    assert "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation" in done.output()
    assert "may not repeat bit for bit" in done.output()


def test_a_failed_assertion_on_the_device_is_named_and_costs_the_steps_since_the_last_snapshot(train: Train) -> None:
    done = train({"args": ["--task", "gpu_tasks:Asserts", "--epochs", "20", "--max-steps", "400"]})
    failure = done.status.last_failure
    assert (done.status.phase, done.status.restarts) == (Phase.SUCCEEDED, 1), done.output()
    assert failure is not None
    assert failure.reason == "CUDAError", failure
    assert "device-side assert" in failure.message
    assert done.events("resumed")[0]["step"] == 200
    assert len(done.losses()) == 400


def test_a_kernel_that_does_not_end_is_a_stall_after_which_the_device_is_free(train: Train) -> None:
    gc.collect()
    free = torch.cuda.mem_get_info()[0]
    stall = {"minSeconds": 5, "maxSeconds": 30}
    done = train({"args": ["--task", "gpu_tasks:Spins", "--epochs", "20", "--max-steps", "400"], "stall": stall})
    failure = done.status.last_failure
    assert (done.status.phase, done.status.restarts) == (Phase.SUCCEEDED, 1), done.output()
    assert failure is not None
    assert (failure.reason, failure.rank) == ("Stalled", 0), failure
    assert torch.cuda.mem_get_info()[0] > free - (1 << 30)


def test_sigterm_while_a_step_is_compiled_ends_with_a_snapshot(tmp_path: Path) -> None:
    volume = replace(Volume(tmp_path, here=HERE), fresh=True)
    stopped = volume.train(1, "--task", "gpu_tasks:StoppedWhileCompiling", "--compile", "--max-steps", "50")
    assert "exitcode" in stopped.stderr, stopped.stderr
    assert volume.newest_manifest()["kind"] == "preempted"
    volume.trained(1, "--task", "gpu_tasks:StoppedWhileCompiling", "--max-steps", "50", DDPJOB_ATTEMPT="1")
    assert sorted(volume.losses()) == list(range(1, 51))


def test_the_gpu_is_measured() -> None:
    held = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    gpu, *_ = eventually(GPUs().look, "an answer of NVML (nvidia-ml-py)")
    assert gpu.index == 0
    assert gpu.memory_bytes is not None
    assert gpu.memory_limit_bytes is not None
    assert held.numel() < gpu.memory_bytes < gpu.memory_limit_bytes
    assert gpu.utilization is not None
    assert 0 <= gpu.utilization <= 1
