"""Calls of a loop in the wrong order are noticed, and the message names the right one."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.client.one_rank import model_and_optimizer, step
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

from ddp_trainer.contract.exit_codes import UserError


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


def test_a_chain_of_schedulers_is_watched_by_its_parts(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    chain = ChainedScheduler([ConstantLR(optimizer), ExponentialLR(optimizer, 0.9)], optimizer)
    run = attach(model, optimizer, scheduler=chain)
    run.resume()
    for _ in range(2):
        loss = step(model, optimizer)
        chain.step()
        run.step_end(loss)
    chain.step()
    with pytest.raises(UserError, match=r"scheduler\.step\(\) was called after run\.step_end\(\)"):
        step(model, optimizer)


def test_a_gradient_scaler_that_is_updated_after_the_end_of_the_step_is_an_error(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu")
    run = attach(model, optimizer, scaler=scaler)
    run.resume()
    for is_last in (False, True):
        scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
        scaler.step(optimizer)
        if not is_last:
            scaler.update()
            run.step_end()
    with pytest.raises(UserError, match=r"run\.step_end\(\) was called before scaler\.update\(\)"):
        run.step_end()


class Lookahead:
    """An optimizer around another one, without torch's class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])


def test_the_order_around_an_optimizer_of_no_class_of_torchs_is_known_by_its_scheduler(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    wrapper, scheduler, ema = Lookahead(optimizer), StepLR(optimizer, 1), AveragedModel(model)
    run = attach(model, wrapper, scheduler=scheduler, ema=ema)
    run.resume()
    for _ in range(2):
        loss = step(model, wrapper)  # type: ignore[arg-type]
        scheduler.step()
        ema.update_parameters(model)
        run.step_end(loss)
    scheduler.step()
    with pytest.raises(UserError, match=r"scheduler\.step\(\) was called after run\.step_end\(\)"):
        step(model, wrapper)  # type: ignore[arg-type]


def test_without_any_optimizer_of_torchs_nothing_is_said_of_the_order(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    wrapper, ema = Lookahead(optimizer), AveragedModel(model)
    run = attach(model, wrapper, ema=ema)
    run.resume()
    for _ in range(2):
        loss = step(model, wrapper)  # type: ignore[arg-type]
        ema.update_parameters(model)
        run.step_end(loss)
    run.finish()


def test_a_handler_of_sigterm_that_comes_after_resume_is_reported_once(attach: Any, capfd: Any) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    run.resume()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for _ in range(2):
        run.step_end(step(model, optimizer))
    assert capfd.readouterr().out.count("SIGTERM has another handler since run.resume()") == 1


def test_the_last_step_of_a_scheduler_is_noticed_at_the_end(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    scheduler = StepLR(optimizer, 1)
    run = attach(model, optimizer, scheduler=scheduler)
    run.resume()
    run.step_end(step(model, optimizer))
    scheduler.step()
    with pytest.raises(UserError, match=r"scheduler\.step\(\) was called after"):
        run.finish()


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


def test_a_step_whose_update_the_loop_leaves_out_counts(attach: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """As `if torch.isfinite(norm): optimizer.step()` does; a policy for what is not finite has nothing to stop."""
    model, optimizer = model_and_optimizer()
    scheduler, ema = StepLR(optimizer, 1, gamma=0.5), AveragedModel(model)

    def attached() -> Any:
        environ = {"DDPJOB_NON_FINITE_LOSS": "Stop"}
        return attach(model, optimizer, scheduler=scheduler, ema=ema, environ=environ)

    def train(run: Any, *, norm: float) -> None:
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        if math.isfinite(norm):
            optimizer.step()
        scheduler.step()
        ema.update_parameters(model)
        run.step_end(loss, gradient_norm=norm)

    run = attached()
    run.resume()
    for _ in range(2):
        train(run, norm=1.0)
    weight = model.weight.clone()
    for _ in range(10):
        train(run, norm=math.inf)
    assert torch.equal(model.weight, weight)
    train(run, norm=1.0)
    run.finish()
    said = capsys.readouterr().out
    assert said.count("has ended without an optimizer.step()") == 2  # the first and the tenth
    assert "step 12 has ended without an optimizer.step(), as 10 of this attempt did" in said
    again = attached()
    assert again.resume() == 13
    assert (scheduler.last_epoch, int(ema.n_averaged)) == (13, 13)
    train(again, norm=math.inf)  # the first step after a resume


def test_an_update_by_an_optimizer_that_the_run_does_not_know_is_an_error(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    run.resume()
    for _ in range(3):
        run.step_end(step(model, optimizer))
    loss = step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match=r"the weights have changed: pass the optimizer that changes them by name"):
        run.step_end(loss)


class Sharp(torch.optim.Optimizer):
    """As SAM is written: one optimizer of torch's class around another, which has the moments and makes the update."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = torch.optim.Adam(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    def second_step(self) -> None:
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def sharp_step(model: torch.nn.Module, optimizer: Sharp) -> torch.Tensor:
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.second_step()
    return loss


def test_an_update_by_an_optimizer_inside_of_another_is_an_error_that_names_it(
    attach: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = model_and_optimizer()
    optimizer = Sharp(model.parameters())
    run = attach(model, optimizer)
    run.resume()
    advice = "attach(model, optimizer.base_optimizer, outer=optimizer)"
    assert advice in capsys.readouterr().out
    loss = sharp_step(model, optimizer)
    with pytest.raises(UserError, match=r"optimizer\.base_optimizer, whose state is in no snapshot") as caught:
        run.step_end(loss)
    assert advice in str(caught.value)


def test_an_optimizer_and_the_one_inside_are_resumed_where_both_are_passed(
    attach: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = []
    for steps in (2, 0):
        model, _ = model_and_optimizer()
        optimizer = Sharp(model.parameters())
        run = attach(model, optimizer.base_optimizer, outer=optimizer)
        assert run.resume() == 2 - steps
        for _ in range(steps):
            run.step_end(sharp_step(model, optimizer))
        run.finish()
        assert optimizer.base_optimizer.param_groups is optimizer.param_groups, "a schedule of one is that of both"
        moments.append(optimizer.base_optimizer.state[next(model.parameters())]["exp_avg"])
    assert torch.equal(*moments)
    assert "base_optimizer" not in capsys.readouterr().out


def test_an_emergency_snapshot_has_no_scheduler_of_the_next_step(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    scheduler = StepLR(optimizer, 1)
    run = attach(model, optimizer, scheduler=scheduler, environ={"DDPJOB_SNAPSHOT_EVERY": "100steps"})
    run.resume()
    for _ in range(3):
        loss = step(model, optimizer)
        scheduler.step()
        run.step_end(loss)
    scheduler.step()  # of a step that leaves its update out, and fails
    run.emergency(ValueError("seeded"))
    again = attach(model, optimizer, scheduler=scheduler)
    assert again.resume() == 0


@pytest.mark.parametrize("total", [None, 3], ids=["steps without end", "the last step"])
def test_a_failure_after_the_loop_leaves_an_emergency_snapshot_of_its_last_step(attach: Any, total: int | None) -> None:
    """As of an evaluation, before its result is passed to finish."""
    model, optimizer = model_and_optimizer()
    seldom = {"DDPJOB_SNAPSHOT_EVERY": "100steps"}
    run = attach(model, optimizer, total_steps=total, environ=seldom)
    run.resume()
    for _ in range(3):
        run.step_end(step(model, optimizer))
    run.emergency(MemoryError("in the evaluation"))
    assert attach(model, optimizer, total_steps=total, environ=seldom).resume() == 3


@pytest.mark.parametrize("number", [1, 2])
def test_the_end_of_each_micro_batch_is_no_end_of_a_step_wherever_the_run_begins(attach: Any, number: int) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    run.resume()

    def train() -> None:
        for at in range(number, number + 4):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            if at % 2 == 0:
                optimizer.step()
            run.step_end(loss)

    with pytest.raises(UserError, match=r"not for each micro-batch"):
        train()


def test_a_last_call_without_a_loss_is_no_step_that_was_skipped(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    run.resume()
    for _ in range(3):
        run.step_end(step(model, optimizer))
    with pytest.raises(UserError, match=r"without an optimizer\.step\(\)"):
        run.step_end(epoch_end=True)


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


def trained(attach: Any, steps: int = 1, total_steps: int | None = None, **environ: str) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, environ={"DDPJOB_ATTEMPT": "3", **environ}, total_steps=total_steps)
    for _ in range(run.resume(), steps):
        run.step_end(step(model, optimizer))
    run.finish()


def test_a_second_run_of_a_job_is_an_error_once_the_first_is_finished(attach: Any, tmp_path: Path) -> None:
    trained(attach)
    trained(attach, 2, total_steps=2)  # the same run, for more steps
    with pytest.raises(UserError, match="has finished its run"):
        trained(attach, 2, total_steps=2)
    # as for the next fold of a cross-validation, which would resume at the end of this one and train nothing; without
    # an operator nothing says when the job was created
    with pytest.raises(UserError, match=r"has finished its run of the job job.*Give all models to one attach"):
        trained(attach, DDPJOB_CREATED="")
    trained(attach, DDPJOB_NAME="fold-2")
    trained(attach, DDPJOB_SHARED=str(tmp_path / "elsewhere"))


def test_a_run_that_was_attached_before_another_was_finished_does_not_resume_from_it(attach: Any) -> None:
    other = attach(*model_and_optimizer(), environ={"DDPJOB_ATTEMPT": "3"})
    trained(attach)
    with pytest.raises(UserError, match="has finished its run"):
        other.resume()


def test_a_run_that_was_stopped_is_finished_too(attach: Any) -> None:
    same = {"DDPJOB_ATTEMPT": "3"}
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, environ=same)
    run.resume()
    signal.raise_signal(signal.SIGTERM)
    while not run.should_stop():
        run.step_end(step(model, optimizer))
    run.finish()
    with pytest.raises(UserError, match="has finished its run"):
        attach(model, optimizer, environ=same).resume()
    with pytest.raises(UserError, match="this process was stopped in a run of the job job before, and"):
        attach(model, optimizer, environ=same).training_begins()


def test_a_run_that_was_not_finished_may_be_attached_again(attach: Any) -> None:
    same = {"DDPJOB_ATTEMPT": "3"}
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, environ=same)
    run.resume()
    for _ in range(3):
        run.step_end(step(model, optimizer))
    run.emergency(ValueError("in step 4"))
    run = attach(model, optimizer, environ=same)
    assert run.resume() == 3
    run.finish()
    # the checkpoints of a script that saves itself are others than the snapshots
    assert attach(environ=same).resume() == 0


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
