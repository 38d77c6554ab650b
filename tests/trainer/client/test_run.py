"""What `attach` gives to a program on one rank: what it saves, what it refuses, and which order of calls it notices."""

from __future__ import annotations

import importlib
import inspect
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

import ddp_trainer
from ddp_trainer.client.own_values import MOST_VALUES
from ddp_trainer.client.run import Run
from ddp_trainer.contract.exit_codes import LossNotFinite, RollBack, UserError
from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from ddp_trainer.rank import failures
from ddp_trainer.rank.observe import close_observer, observe
from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.manifest import Manifest
from ddpjob_operator.core.failure.detect import Failure, Retry
from ddpjob_operator.core.failure.diagnosis import diagnose


@pytest.fixture
def attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Attach as the next attempt of a job on a volume of this test."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(failures, "_actions", [])
    # one that is told to stop would make this process end with 143, whatever its tests say
    monkeypatch.setattr(sys.modules[Run.__module__], "leave_as_preempted", lambda step: None)
    attempts = iter(range(9))

    def attached(*args: Any, **settings: Any) -> Run:
        environ = {
            "DDPJOB_SHARED": str(tmp_path / "shared"),
            "DDPJOB_RUN_DIR": str(tmp_path / "run"),
            "DDPJOB_NAME": "job",
            "DDPJOB_UID": "uid",
            "DDPJOB_CREATED": "1",
            "DDPJOB_ATTEMPT": str(next(attempts)),
            "DDPJOB_SNAPSHOT_EVERY": "2steps",
            "DDPJOB_SNAPSHOT_KEEP": "2",
        }
        return ddp_trainer.attach(*args, environ={**environ, **settings.pop("environ", {})}, **settings)

    yield attached
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.ones(2, 4)).square().mean()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss


# The order of calls


def test_a_scheduler_that_is_stepped_after_the_end_of_the_step_is_an_error(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    scheduler = StepLR(optimizer, 1)
    run = attach(model, optimizer, scheduler=scheduler)
    run.resume()
    run.step_end(step(model, optimizer))
    scheduler.step()
    with pytest.raises(
        UserError, match=r"scheduler\.step\(\) was called after run\.step_end\(\).*before run\.step_end"
    ):
        step(model, optimizer)


def test_the_last_step_of_a_scheduler_is_noticed_at_the_end(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    scheduler = StepLR(optimizer, 1)
    run = attach(model, optimizer, scheduler=scheduler)
    run.resume()
    run.step_end(step(model, optimizer))
    scheduler.step()
    with pytest.raises(UserError, match=r"scheduler\.step\(\) was called after"):
        run.finish()


def test_a_last_snapshot_that_does_not_fit_is_an_error_that_says_why(
    attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    run.resume()
    run.step_end(step(model, optimizer))
    monkeypatch.setattr(Disk, "free_bytes", lambda disk, path: 0)
    with pytest.raises(
        RuntimeError, match=r"final snapshot of step 1 could not be saved: .*the volume is full \(0"
    ) as error:
        run.finish()
    failure = Failure("WorkerException", f"rank 0 raised RuntimeError: {error.value}", Retry.YES)
    assert "expand the claim" in diagnose(failure).advice
    assert diagnose(failure).deterministic, "a second attempt would train to the same end"


def test_an_average_of_weights_that_is_updated_after_the_end_of_the_step_is_an_error(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    ema = AveragedModel(model)
    run = attach(model, optimizer, ema=ema)
    run.resume()
    run.step_end(step(model, optimizer))
    ema.update_parameters(model)
    with pytest.raises(UserError, match=r"ema\.update_parameters\(\) was called after run\.step_end"):
        step(model, optimizer)


def test_the_end_of_a_step_without_an_optimizer_step_is_an_error(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    run.resume()
    run.step_end(step(model, optimizer))
    with pytest.raises(UserError, match=r"step_end\(\) was called without an optimizer\.step\(\)"):
        run.step_end(1.0)


@pytest.mark.parametrize("call", ["step_end", "finish"])
def test_a_call_before_resume_is_an_error(attach: Any, call: str) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    loss = step(model, optimizer)
    with pytest.raises(UserError, match=rf"run\.{call}\(\) was called before run\.resume\(\)"):
        run.step_end(loss) if call == "step_end" else run.finish()


def test_a_second_resume_is_an_error(attach: Any) -> None:
    run = attach(*model_and_optimizer())
    run.resume()
    with pytest.raises(UserError, match=r"resume\(\) was called twice"):
        run.resume()


def test_a_scheduler_and_an_average_in_their_place_are_no_error(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    scheduler, ema = StepLR(optimizer, 1), AveragedModel(model)
    run = attach(model, optimizer, scheduler=scheduler, ema=ema)
    run.resume()
    for _ in range(3):
        loss = step(model, optimizer)
        scheduler.step()
        ema.update_parameters(model)
        run.step_end(loss)
    run.finish()
    assert run.step == 3


def test_a_step_that_a_gradient_scaler_skips_is_a_step(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    run = attach(model, optimizer, scaler=scaler)
    run.resume()
    for factor in (1.0, float("inf"), float("inf"), 1.0):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).mean()
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        run.step_end(1.0)
    assert (run.step, scaler.get_scale()) == (4, 0.5)


# What is saved


def trained(attach: Any, make: Callable[[], dict[str, Any]], steps: int) -> tuple[dict[str, Any], int]:
    """States after so many more steps of the next attempt, and the step that it began with."""
    states = make()
    run = attach(states["model"], states["optimizer"], **{n: s for n, s in states.items() if n not in FIRST})
    began = run.resume()
    for _ in range(steps):
        inner = [s for s in states.values() if isinstance(s, torch.optim.Optimizer)]
        scaler = states.get("scaler")
        for optimizer in inner:
            optimizer.zero_grad()
        loss = sum(m(torch.ones(2, 4)).square().mean() for n, m in states.items() if n in ("model", "critic"))
        assert isinstance(loss, torch.Tensor)
        (loss if scaler is None else scaler.scale(loss)).backward()
        for optimizer in inner:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        if "scheduler" in states:
            states["scheduler"].step()
        if "ema" in states:
            states["ema"].update_parameters(states["model"])
        run.step_end(loss)
    run.finish()
    return {name: value.state_dict() for name, value in states.items()}, began


FIRST = ("model", "optimizer")


def all_kinds() -> dict[str, Any]:
    model, critic = nn.Linear(4, 1), nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "critic": critic,
        "critic_optimizer": torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9),
        "scheduler": StepLR(optimizer, 2, gamma=0.5),
        "scaler": torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2),
        "ema": AveragedModel(model),
    }


def with_accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    prepared = Accelerator(cpu=True).prepare(model, optimizer, StepLR(optimizer, 2, gamma=0.5))
    return dict(zip(("model", "optimizer", "scheduler"), prepared, strict=True))


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}").items()}
    if isinstance(value, list | tuple):
        return flat(dict(enumerate(value)), path)
    return {path: value.tolist() if isinstance(value, torch.Tensor) else value}


@pytest.mark.parametrize("make", [all_kinds, with_accelerate])
def test_a_resumed_run_has_the_states_of_an_unbroken_one(attach: Any, tmp_path: Path, make: Any) -> None:
    torch.manual_seed(0)
    elsewhere = {"DDPJOB_SHARED": str(tmp_path / "unbroken")}
    unbroken, _ = trained(lambda *a, **k: attach(*a, environ=elsewhere, **k), make, 7)
    torch.manual_seed(0)
    _, began = trained(attach, make, 4)
    assert began == 0
    torch.manual_seed(99)
    resumed, began = trained(attach, make, 3)
    assert began == 4
    assert flat(resumed) == flat(unbroken)


def test_a_program_that_saves_itself_goes_on_from_its_newest_checkpoint(attach: Any) -> None:
    run = attach()
    assert (run.latest(), run.resume()) == (None, 0)
    due = []
    for number in range(1, 6):
        run.step_end()
        due.append(run.should_save())
        with run.checkpoint() as folder:
            (folder / "state.txt").write_text(f"step {number}")
    assert due == [False, True, False, True, False]  # every 2 steps, as the job says
    run = attach()
    assert run.resume() == 5
    latest = run.latest()
    assert (latest.name, (latest / "state.txt").read_text()) == ("checkpoint-000000000005", "step 5")
    assert sorted(path.name for path in latest.parent.glob("checkpoint-*"))[0] == "checkpoint-000000000004"


def save(run: Run, step: int | None = None, text: str = "") -> None:
    with run.checkpoint(step) as folder:
        (folder / "state.txt").write_text(text)


def test_a_second_checkpoint_of_a_step_is_an_error_and_the_first_one_stays(attach: Any) -> None:
    run = attach()
    run.resume()
    save(run, 3, "first")
    with pytest.raises(UserError, match=r"step 3 has a checkpoint of this run already.* pass step=…"):
        save(run, 3, "second")
    assert (run.latest() / "state.txt").read_text() == "first"
    run = attach()
    save(run, 3, "of the next attempt, whose step 3 is the same")
    assert (run.latest() / "state.txt").read_text() == "first"


def test_a_run_goes_on_from_the_checkpoint_that_the_program_has_loaded(attach: Any) -> None:
    run = attach()
    run.resume()
    save(run, 3)
    save(run, 5)
    run = attach()
    latest = run.latest()
    assert latest.name == "checkpoint-000000000005"
    (latest / "state.txt").write_text("damaged after it was verified")
    assert (run.latest(), run.resume()) == (latest, 5)


def test_a_save_that_has_been_made_is_no_longer_asked_for(attach: Any) -> None:
    run = attach()
    run.resume()
    run.step_end()
    run.step_end()
    assert run.should_save()
    save(run)
    assert not run.should_save()


def test_a_stopped_run_that_saves_itself_ends_with_its_log_closed(attach: Any) -> None:
    before = set(threading.enumerate())
    run = attach()
    run.resume()
    signal.raise_signal(signal.SIGTERM)
    while not run.should_stop():
        run.step_end()
    save(run)
    (logs,) = (thread for thread in set(threading.enumerate()) - before if thread.name == "logs")
    run.finish()
    assert not logs.is_alive()


def test_the_time_of_a_checkpoint_counts_once(attach: Any, tmp_path: Path) -> None:
    run = attach()
    run.resume()
    save(run, 1)
    (beat,) = read_heartbeats(tmp_path / "run")
    counters = beat["counters"]
    assert beat["saveSeconds"] == counters["saveSeconds"]["sum"] > 0
    assert counters["stallSeconds"]["sum"] == 0, "it is in the phase `save`"


def test_a_checkpoint_is_on_record_in_the_status(attach: Any, tmp_path: Path) -> None:
    run = attach()
    run.resume()
    with run.checkpoint(12) as folder:
        (beat,) = read_heartbeats(tmp_path / "run")
        assert beat["phase"] == "save"
        (folder / "state").touch()
    (beat,) = read_heartbeats(tmp_path / "run")
    assert (beat["snapshot"]["step"], beat["snapshot"]["verified"], beat["counters"]["saves"]) == (
        12,
        True,
        {"saved": 1},
    )


def test_a_program_that_saves_itself_is_still_observed_and_each_step_counts_once(attach: Any, tmp_path: Path) -> None:
    heartbeat_dir(tmp_path / "run").mkdir(parents=True)
    observe(Heartbeat(heartbeat_dir(tmp_path / "run"), observed=True), world_size=1)
    try:
        model, optimizer = model_and_optimizer()
        run = attach(total_steps=9)
        run.resume()
        for _ in range(3):
            loss = step(model, optimizer)
            run.step_end(loss)
        with run.checkpoint() as folder:
            (folder / "state").touch()
    finally:
        close_observer()
    (beat,) = read_heartbeats(tmp_path / "run")
    assert (beat["step"], beat["totalSteps"], beat["counters"]["steps"]) == (3, 9, 3)
    assert (beat["snapshot"]["step"], beat["observed"]) == (3, True)
    assert beat["loss"] == pytest.approx(float(loss.detach()))


# What is refused


def refusal(attach: Any, *args: Any, **states: Any) -> str:
    with pytest.raises(UserError) as caught:
        attach(*args, **states)
    return str(caught.value)


@pytest.mark.usefixtures("process_group")
def test_fsdp1_and_zero_are_refused_by_name_with_the_way_out(attach: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, optimizer = model_and_optimizer()
    sharded = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(sharded)
    text = refusal(attach, nn.Sequential(sharded), optimizer)
    assert text.startswith("model cannot be saved in a snapshot: FullyShardedDataParallel (FSDP1)")
    assert "fully_shard (FSDP2), or save with its own writer" in text
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    text = refusal(attach, model, zero)
    assert text.startswith("optimizer cannot be saved in a snapshot: ZeroRedundancyOptimizer")
    assert "run.checkpoint()" in text


def test_a_deepspeed_engine_is_refused_by_name_with_the_way_out(attach: Any, monkeypatch: Any) -> None:
    deepspeed: Any = ModuleType("deepspeed")
    deepspeed.DeepSpeedEngine = type("DeepSpeedEngine", (nn.Module,), {})
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    text = refusal(attach, deepspeed.DeepSpeedEngine(), model_and_optimizer()[1])
    assert "a DeepSpeed engine writes its own checkpoints; save with its own writer instead" in text


class Unsavable:
    def state_dict(self) -> dict[str, Any]:
        return {"function": print}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_a_state_that_no_snapshot_can_hold_is_refused_before_training(attach: Any) -> None:
    text = refusal(attach, *model_and_optimizer(), loader=Unsavable())
    assert "loader cannot be saved in a snapshot: loader.function is a builtins.builtin_function_or_method" in text


def test_the_scaler_inside_accelerates_optimizer_has_to_be_among_the_states(attach: Any) -> None:
    from accelerate.optimizer import AcceleratedOptimizer

    model, optimizer = model_and_optimizer()
    wrapped = AcceleratedOptimizer.__new__(AcceleratedOptimizer)
    wrapped.optimizer, wrapped.scaler = optimizer, torch.amp.GradScaler("cpu")
    assert "optimizer scales its gradients: pass its scaler too" in refusal(attach, model, wrapped)
    attach(model, wrapped, scaler=wrapped.scaler)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ({"losses": Unsavable()}, "a state may not be called 'losses'"),
        ({"rng": Unsavable()}, "a state may not be called 'rng'"),
        ({"changes_with_optimizer": ["cursor"]}, "changes_with_optimizer names 'cursor', which is no state"),
        ({"loader": object()}, "loader is a object without state_dict() and load_state_dict()"),
    ],
)
def test_a_state_that_cannot_be_one_is_refused(attach: Any, states: Any, said: str) -> None:
    assert said in refusal(attach, *model_and_optimizer(), **states)


def test_a_model_and_an_optimizer_in_the_wrong_order_are_refused(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    assert "the model is a Adam, not a torch.nn.Module" in refusal(attach, optimizer, model)


def test_a_model_without_an_optimizer_is_refused(attach: Any) -> None:
    assert "attach() takes a model with its optimizer" in refusal(attach, nn.Linear(1, 1))


@pytest.mark.usefixtures("process_group")
def test_ranks_that_a_script_has_started_itself_under_torchrun_are_refused(attach: Any) -> None:
    text = refusal(attach, environ={"RANK": "0", "WORLD_SIZE": "2"})
    assert "torchrun has started this process as rank 0 of 2, and its process group says rank 0 of 1" in text
    assert "torch.multiprocessing.spawn" in text


def test_several_ranks_without_a_process_group_are_refused(attach: Any) -> None:
    text = refusal(attach, environ={"RANK": "0", "WORLD_SIZE": "2"})
    assert "call torch.distributed.init_process_group() before attach()" in text


# What is reported


def test_a_phase_is_shown_and_its_time_is_no_step(attach: Any, tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    run.resume()
    run.step_end(step(model, optimizer))
    with run.phase("validate"):
        run.beat()
        (beat,) = read_heartbeats(tmp_path / "run")
        assert beat["phase"] == "validate"
    (beat,) = read_heartbeats(tmp_path / "run")
    assert beat["phase"] == "train"
    assert "validate" in beat["phaseSeconds"]


def test_an_unknown_phase_names_those_that_there_are(attach: Any) -> None:
    with pytest.raises(UserError, match="the phases are load, validate, save"), attach().phase("compile"):
        pass


def test_logged_values_reach_the_status_and_tensorboard(attach: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, global_batch=2)
    run.resume()
    run.step_end(step(model, optimizer))
    run.log({"val/loss": 2.5}, accuracy=torch.tensor(0.75))
    run.finish(final_accuracy=0.8)
    (beat,) = read_heartbeats(tmp_path / "run")
    assert beat["metrics"] == {"val/loss": 2.5, "accuracy": 0.75, "final_accuracy": 0.8}
    assert (beat["phase"], beat["samples"], beat["learningRate"]) == ("done", 2, 0.1)
    events = EventAccumulator(str(tmp_path / "shared" / "logs" / "job" / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("val/loss")] == [(1, 2.5)]


@pytest.mark.parametrize("name", ["a b", "", "1st", "x" * 65])
def test_a_name_that_no_series_can_have_is_an_error(attach: Any, name: str) -> None:
    with pytest.raises(UserError, match=r"is no name of a value"):
        attach().log({name: 1.0})


def test_a_value_that_is_no_number_is_an_error(attach: Any) -> None:
    with pytest.raises(UserError, match="accuracy is 'high', which is not a number"):
        attach().log(accuracy="high")


def test_a_run_logs_a_bounded_number_of_values(attach: Any, tmp_path: Path, capsys: Any) -> None:
    run = attach()
    for number in range(MOST_VALUES + 5):
        run.log({f"value{number}": 1.0})
    run.log(value0=2.0)
    run.resume()
    run.finish()
    (beat,) = read_heartbeats(tmp_path / "run")
    assert len(beat["metrics"]) == MOST_VALUES
    assert beat["metrics"]["value0"] == 2.0
    assert capsys.readouterr().err.count("is not reported") == 1


def test_values_that_come_together_beyond_the_bound_are_refused_once(attach: Any, capsys: Any) -> None:
    run = attach()
    for _ in range(3):
        run.log({f"value{number}": 1.0 for number in range(MOST_VALUES + 2)})
    assert capsys.readouterr().err.count("is not reported: a run logs 64 values") == 1


def test_help_does_not_print_the_environment() -> None:
    assert "environ(" not in str(inspect.signature(importlib.import_module("ddp_trainer.client.attach").attach))


# A loss that is not finite


def test_a_loop_of_ones_own_is_stopped_and_rolled_back_by_its_losses(attach: Any, tmp_path: Path) -> None:
    def train(policy: str, losses: list[float]) -> Run:
        model, optimizer = model_and_optimizer()
        run = attach(model, optimizer, environ={"DDPJOB_NON_FINITE_LOSS": policy})
        try:
            for number in range(run.resume(), len(losses)):
                step(model, optimizer)
                run.step_end(losses[number])
        except Exception as error:
            run.emergency(error)  # as the worker does
            raise
        run.finish()
        return run

    broken = [0.5] * 4 + [float("inf")] + [0.5] * 5
    with pytest.raises(LossNotFinite, match="the loss of step 5 is inf"):
        train("Stop", broken)
    with pytest.raises(RollBack, match="the loss of step 5 is inf"):
        train("Rollback", broken)
    run = train("Rollback", [0.5] * 10)
    assert (run.rollbacks, run.skipped_steps) == (1, {4, 5})
    lines = (tmp_path / "shared/logs/job/events.jsonl").read_text().splitlines()
    resumed = [event["step"] for line in lines if (event := json.loads(line))["event"] == "resumed"]
    assert resumed == [4, 2], "that of step 4 may hold what made the loss of step 5"


def test_a_loop_of_ones_own_skips_what_it_was_rolled_back_from(attach: Any, tmp_path: Path) -> None:
    def train() -> Run:
        model, optimizer = model_and_optimizer()
        run = attach(model, optimizer, environ={"DDPJOB_NON_FINITE_LOSS": "Rollback"})
        for number in range(run.resume() + 1, 11):
            if number in run.skipped_steps:
                run.skip_step()
                continue
            step(model, optimizer)
            run.step_end(float("inf") if number == 5 else 0.5)
        run.finish()
        return run

    with pytest.raises(RollBack, match="skips steps 4 and 5"):
        train()
    assert train().step == 10
    lines = (tmp_path / "shared/logs/job/events.jsonl").read_text().splitlines()
    assert [event["step"] for line in lines if (event := json.loads(line))["event"] == "step_skipped"] == [4, 5]


def test_checkpoints_of_ones_own_are_rolled_back_too(attach: Any) -> None:
    rollback = {"environ": {"DDPJOB_NON_FINITE_LOSS": "Rollback"}}
    run = attach(**rollback)
    assert run.resume() == 0

    def train() -> None:
        for number in range(1, 9):
            run.step_end(float("nan") if number == 5 else 0.5)
            if run.should_save():
                with run.checkpoint() as folder:
                    (folder / "weights").write_text(str(number))

    with pytest.raises(RollBack):
        train()
    assert attach(**rollback).resume() == 2


def test_a_checkpoint_says_whether_its_loss_was_finite(attach: Any) -> None:
    run = attach(config={"lr": 0.1})
    run.resume()
    run.step_end(float("nan"))
    with run.checkpoint() as folder:
        (folder / "weights").write_text("")
    manifest = Manifest.read(run.latest())
    assert (manifest.loss_is_finite, manifest.config) == (False, {"lr": 0.1})


def test_the_digest_of_submitted_code_is_in_snapshots_and_in_the_event_that_begins_the_run(attach, tmp_path) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, environ={"DDPJOB_CODE_DIR": "/etc/ddpjob/code", "DDPJOB_CODE_SHA256": "ab" * 32})
    run.resume()
    for _ in range(2):
        run.step_end(step(model, optimizer))
    run.finish()
    (manifest,) = (tmp_path / "shared/checkpoints/job").glob("step-*2/manifest.json")
    assert Manifest.read(manifest.parent).code_sha256 == "ab" * 32
    events = [json.loads(line) for line in (tmp_path / "shared/logs/job/events.jsonl").read_text().splitlines()]
    assert next(event for event in events if event["event"] == "started")["codeSha256"] == "ab" * 32
