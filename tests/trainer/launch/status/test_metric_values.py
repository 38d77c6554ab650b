"""Each series of a trainer pod has the value that its row of the table promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from ddp_trainer.launch.status.counters import CounterLedger
from ddp_trainer.launch.status.host import GPU, Usage
from ddp_trainer.launch.status.metric_table import TABLE
from ddp_trainer.launch.status.metrics import metrics_page
from ddp_trainer.launch.status.pod_state import PodState
from ddp_trainer.live.costs import Costs


def report(directory: Path) -> None:
    """Of a rank whose numbers are all different."""
    now = 1000.0
    heartbeat = Heartbeat(heartbeat_dir(directory), rank=0, clock=lambda: now)
    heartbeat.resumed(100, samples=6400)
    heartbeat.enter("train")
    for step in range(101, 121):
        now += 0.08
        heartbeat.waited_for_data(0.004)
        heartbeat.passes_took(0.05)
        heartbeat.step(
            step=step, epoch=3, total_steps=400, samples=step * 64, loss=0.31, samples_per_second=900.5,
            learning_rate=0.1, step_seconds=0.07,
        )  # fmt: skip
    heartbeat.snapshot(110, 1763703999.0, True, size=4096, stall_seconds=0.01, save_seconds=0.2, result="saved")
    for result, often in (("saved", 4), ("failed", 2), ("skipped", 3)):
        for _ in range(often):
            heartbeat.snapshot(result=result)
    for cause, steps in (("overflow", 9), ("rollback", 6), ("no_update", 7)):
        heartbeat.skipped_steps(cause, steps)
    for step in range(102, 113):
        heartbeat.non_finite_loss(step)
    for _ in range(8):
        heartbeat.out_of_memory(16)
    heartbeat.metrics(eval_accuracy=0.96)
    costs = Costs().after("lost", 0.25, has_dropped=True).after("left", 0.5, has_dropped=False)
    heartbeat.recovers_live(2, costs.after("joined", 0.125, has_dropped=True).to_json())


def test_each_series_has_its_own_value(pod: PodEnvironment, tmp_path: Path) -> None:
    report(tmp_path)
    heartbeats = read_heartbeats(tmp_path)
    ranks = [{"rank": one["rank"], "localRank": one["localRank"], "pid": one["pid"], "time": 0.0} for one in heartbeats]
    state = PodState(now=heartbeats[0]["time"] + 1.5, wall=5.0, ranks=ranks, heartbeats=heartbeats)
    used, gpu = Usage(2.5, 200, 512), GPU(1, 0.4, 300, 800)
    body, _ = metrics_page(lambda: (pod, state), CounterLedger(), lambda: used, lambda: [gpu])("")
    samples = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]
    assert {sample.labels.pop("ddpjob") for sample in samples} == {"digits"}
    found = {" ".join((one.name, *one.labels.values())): one.value for one in samples if "le" not in one.labels}
    expected = {
        "ddpjob_trainer_info 0 0 2": 1,
        "ddpjob_rank_heartbeat_age_seconds 0": 1.5,
        "ddpjob_rank_step_seconds 0": 0.08,
        "ddpjob_rank_data_wait_seconds 0": 0.004,
        "ddpjob_rank_passes_seconds 0": 0.05,
        "ddpjob_pod_cpu_seconds_total": 2.5,
        "ddpjob_pod_memory_bytes": 200,
        "ddpjob_pod_memory_limit_bytes": 512,
        "ddpjob_gpu_utilization_ratio 1": 0.4,
        "ddpjob_gpu_memory_bytes 1": 300,
        "ddpjob_gpu_memory_limit_bytes 1": 800,
        "ddpjob_train_world_size": 2,
        "ddpjob_train_step": 120,
        "ddpjob_train_total_steps": 400,
        "ddpjob_train_epoch": 3,
        "ddpjob_train_loss": 0.31,
        "ddpjob_train_learning_rate": 0.1,
        "ddpjob_train_samples_per_second": 900.5,
        "ddpjob_train_metric eval_accuracy": 0.96,
        "ddpjob_train_metric micro_batch": 16,
        "ddpjob_snapshot_last_step": 110,
        "ddpjob_snapshot_last_timestamp_seconds": 1763703999,
        "ddpjob_snapshot_last_bytes": 4096,
        "ddpjob_train_steps_total": 20,
        "ddpjob_train_samples_total": 20 * 64,
        "ddpjob_train_micro_batch_reductions_total": 8,
        "ddpjob_train_non_finite_losses_total": 11,
        "ddpjob_train_skipped_steps_total overflow": 9,
        "ddpjob_train_skipped_steps_total rollback": 6,
        "ddpjob_train_skipped_steps_total no_update": 7,
        "ddpjob_snapshot_saves_total saved": 5,
        "ddpjob_snapshot_saves_total failed": 2,
        "ddpjob_snapshot_saves_total skipped": 3,
        "ddpjob_train_step_seconds_count": 20,
        "ddpjob_train_step_seconds_sum": 20 * 0.07,
        "ddpjob_snapshot_stall_seconds_count": 1,
        "ddpjob_snapshot_stall_seconds_sum": 0.01,
        "ddpjob_snapshot_save_seconds_count": 1,
        "ddpjob_snapshot_save_seconds_sum": 0.2,
        "ddpjob_train_data_wait_seconds_count": 20,
        "ddpjob_train_data_wait_seconds_sum": 20 * 0.004,
        "ddpjob_train_live_recovery_seconds_count lost": 1,
        "ddpjob_train_live_recovery_seconds_sum lost": 0.25,
        "ddpjob_train_live_recovery_seconds_count left": 1,
        "ddpjob_train_live_recovery_seconds_sum left": 0.5,
        "ddpjob_train_live_recovery_seconds_count joined": 1,
        "ddpjob_train_live_recovery_seconds_sum joined": 0.125,
        "ddpjob_train_steps_dropped_total": 2,
    }
    assert found == pytest.approx(expected)
    assert [name for name in TABLE if not any(series.startswith(name) for series in expected)] == []
