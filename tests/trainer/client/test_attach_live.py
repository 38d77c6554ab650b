"""A loop with `attach_live` on one rank: the numbers of a plain loop, and an error for what ranks could not share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from tests.trainer.client.one_rank import model_and_optimizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_trainer
from ddp_trainer.client.live_run import LiveRun
from ddp_trainer.client.passes import SharedPasses
from ddp_trainer.contract.exit_codes import Preempted, UserError
from ddp_trainer.live.deciding import Finished
from ddp_trainer.rank.world import World

STEPS = 6
INPUTS = torch.rand(10, 4, generator=torch.Generator().manual_seed(1))

Attach = Callable[..., LiveRun]


@pytest.fixture
def attach_live(attach: Callable[..., Any]) -> Attach:
    """As the next attempt of a job on a volume of this test."""
    return functools.partial(attach, by=ddp_trainer.attach_live)


class Loop:
    """A model, and the samples of each step that it takes."""

    def __init__(self, attach: Attach, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model, self.optimizer = model_and_optimizer()
        self.run = attach(self.model, self.optimizer, global_batch=4, total_steps=STEPS, **settings)
        self.run.resume()
        self.taken: list[list[int]] = []

    def loss(self, share: Tensor) -> Tensor:
        return self.model(INPUTS[share]).square().mean()

    def train(self, until: int = STEPS) -> Loop:
        for batch in self.run.batches(len(INPUTS), seed=3):
            self.taken.append(batch.tolist())
            self.run.train_step(batch, self.loss, self.optimizer.step)
            if self.run.step == until:
                break
        return self


def test_it_ends_with_the_weights_of_a_plain_loop_on_the_same_samples(attach_live: Attach) -> None:
    loop = Loop(attach_live).train()
    torch.manual_seed(0)
    plain, optimizer = model_and_optimizer()
    for batch in loop.taken:
        optimizer.zero_grad()
        plain(INPUTS[torch.tensor(batch)]).square().mean().backward()
        optimizer.step()
    assert [len(batch) for batch in loop.taken] == [4, 4, 2, 4, 4, 2]
    for epoch in (loop.taken[:3], loop.taken[3:]):
        assert sorted(sample for batch in epoch for sample in batch) == list(range(10))
    assert (loop.run.epoch, loop.run.samples) == (2, 20)
    assert torch.allclose(plain.weight, loop.model.weight, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_loss_of_resets_are_those_of_the_whole_batch(attach_live: Attach, set_to_none: bool) -> None:
    """A rank takes its share in several micro-batches while others are missing."""
    loop, other = Loop(attach_live), Loop(attach_live, environ={"DDPJOB_NAME": "other"})

    def loss_of(share: Tensor) -> Tensor:
        loop.optimizer.zero_grad(set_to_none=set_to_none)
        return loop.loss(share)

    batch = list(range(8))  # twice what the ranks take at once
    loop.run.train_step(batch, loss_of, loop.optimizer.step)
    other.run.train_step(batch, other.loss, other.optimizer.step)
    assert torch.equal(loop.model.weight, other.model.weight)  # type: ignore[arg-type]


def test_it_goes_on_after_a_snapshot_with_the_next_batch(attach_live: Attach) -> None:
    first = Loop(attach_live).train(until=4)
    first.run.finish()
    rest = Loop(attach_live)
    assert rest.run.step == 4
    assert torch.equal(rest.model.weight, first.model.weight)  # type: ignore[arg-type]
    rest.train()
    again = Loop(attach_live, environ={"DDPJOB_NAME": "unbroken"}).train()
    assert first.taken + rest.taken == again.taken
    assert torch.equal(rest.model.weight, again.model.weight)  # type: ignore[arg-type]


def test_batches_do_not_go_on_with_another_global_batch(attach_live: Attach) -> None:
    """The step would be another place in the epoch: samples would come twice, or not at all."""
    Loop(attach_live).train(until=2).run.finish()
    model, optimizer = model_and_optimizer()
    run = attach_live(model, optimizer, global_batch=2)
    run.resume()
    with pytest.raises(UserError, match=r"had global_batch=4, this one has 2"):
        next(run.batches(len(INPUTS)))
    run.train_step([0, 1], lambda share: model(INPUTS[share]).mean(), optimizer.step)
    assert run.samples == 10


@pytest.mark.parametrize(("samples", "is_said"), [(10, False), (8, True)])
def test_batches_of_another_data_set_than_that_of_the_snapshot_are_said(
    attach_live: Attach, capsys: pytest.CaptureFixture[str], samples: int, is_said: bool
) -> None:
    Loop(attach_live).train(until=4).run.finish()
    loop = Loop(attach_live)
    next(loop.run.batches(samples))
    said = "the run before trained on 14 samples in 4 steps; with run.batches(8) they would have been 16"
    assert (said in capsys.readouterr().out) == is_said


def test_a_stop_ends_the_batches_after_a_step_that_is_saved(attach_live: Attach) -> None:
    loop = Loop(attach_live).train(until=2)
    loop.run._steps._stop.raised = True
    loop.train()
    assert loop.run.should_stop()
    assert loop.run.step == len(loop.taken) < STEPS
    with pytest.raises(Preempted):
        loop.run.train_step([1], loop.loss, loop.optimizer.step)
    loop.run.finish()
    assert Loop(attach_live).run.step == loop.run.step


def test_a_step_that_a_peer_skips_after_a_rollback_is_left_out(attach_live: Attach) -> None:
    loop = Loop(attach_live).train(until=2)
    loop.run.rolled_back(1, [3])
    before = loop.model.weight.clone()  # type: ignore[operator]
    loop.train(until=3)
    assert torch.equal(loop.model.weight, before)  # type: ignore[arg-type]
    loop.train()
    assert not torch.equal(loop.model.weight, before)  # type: ignore[arg-type]
    assert len(loop.taken) == STEPS
    assert loop.run.rollbacks == 1


def test_batches_of_the_programs_own(attach_live: Attach) -> None:
    loop = Loop(attach_live)
    for step in range(loop.run.step, STEPS):
        loop.run.train_step(range(step, step + 4), loop.loss, loop.optimizer.step, epoch_end=step == 2)
    assert (loop.run.step, loop.run.epoch, loop.run.samples) == (STEPS, 1, 4 * STEPS)


def backward(loop: Loop, share: Tensor) -> Tensor:
    loss = loop.loss(share)
    loss.backward(retain_graph=True)
    return loss


def test_a_rank_without_which_the_others_have_come_to_the_end_succeeds(attach_live: Attach) -> None:
    loop = Loop(attach_live).train(until=STEPS - 1)
    lost, end = RuntimeError("Connection closed by peer"), Finished("training has come to its end")
    loop.run._recovery = Mock(begin_step=Mock(side_effect=lost), go_on=Mock(side_effect=end))
    with pytest.raises(SystemExit) as ended:
        loop.run.train_step([0, 1, 2, 3], loop.loss, loop.optimizer.step)
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda loop: loop.run.train_step([1], lambda share: 0.5, loop.optimizer.step), "the mean loss of its samples"),
        (lambda loop: loop.run.train_step([1], lambda s: loop.loss(s).detach(), loop.optimizer.step), "with its graph"),
        (lambda loop: loop.run.train_step([1], lambda s: backward(loop, s), loop.optimizer.step), "called backward"),
        (lambda loop: loop.run.train_step([1], loop.loss, lambda: None), "no optimizer.step"),
        (lambda loop: loop.run.train_step([], loop.loss, loop.optimizer.step), "at least one"),
        (lambda loop: loop.run.train_step(INPUTS, loop.loss, loop.optimizer.step), "whole numbers"),
        (lambda loop: loop.run.train_step("abc", loop.loss, loop.optimizer.step), "whole numbers"),
        (lambda loop: loop.optimizer.step(), "outside of update"),
        (lambda loop: loop.run.step_end(0.5), "leave it out"),
        (lambda loop: loop.run.skip_step(), "leave it out"),
        (lambda loop: loop.run.agreed_to_stop(), "leave it out"),
        (lambda loop: loop.run.checkpoint(), "attach_live"),
        (lambda loop: loop.run.resume(), "called twice"),
        (lambda loop: list(loop.run.batches(0)), "no sample"),
        (lambda loop: list(loop.run.batches(10)), "with each batch once"),
    ],
)
def test_what_ranks_would_not_do_alike_is_an_error(
    attach_live: Attach, step: Callable[[Loop], object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        step(Loop(attach_live))


def test_after_an_error_in_the_update_there_is_no_next_step(attach_live: Attach) -> None:
    loop = Loop(attach_live)
    with pytest.raises(ZeroDivisionError):
        loop.run.train_step([1], loop.loss, lambda: 1 / 0)
    with pytest.raises(UserError, match="let the run end"):
        loop.run.train_step([1], loop.loss, loop.optimizer.step)


def test_an_optimizer_that_the_run_does_not_know_is_refused(attach_live: Attach) -> None:
    """Its gradients would be summed over no ranks, and never reset."""
    loop, (head, unknown) = Loop(attach_live), model_and_optimizer()

    def loss(share: Tensor) -> Tensor:
        return loop.loss(share) + head(INPUTS[share]).square().mean()

    with pytest.raises(UserError, match=r"does not know.*attach_live\(…, second=optimizer\)"):
        loop.run.train_step([1], loss, lambda: (loop.optimizer.step(), unknown.step()))


def test_an_optimizer_within_another_is_not_refused(attach_live: Attach) -> None:
    """As in wrappers of optimizers, which share their parameters."""
    loop = Loop(attach_live)
    inner = torch.optim.SGD(loop.model.parameters())
    loop.run.train_step([1], loop.loss, lambda: (loop.optimizer.step(), inner.step()))
    assert loop.run.step == 1


def test_between_steps_a_script_may_use_optimizers_of_its_own(attach_live: Attach) -> None:
    """Such as that of a probe, which is trained for a validation."""
    loop, (_, probe) = Loop(attach_live), model_and_optimizer()
    loop.train(until=1)
    probe.step()
    loop.train(until=2)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_whose_gradients_are_of_one_rank_is_refused(attach_live: Attach, by_name: bool) -> None:
    loop = Loop(attach_live)

    def closure() -> float:
        return float(loop.loss(torch.tensor([1])))

    def update() -> None:
        loop.optimizer.step(closure=closure) if by_name else loop.optimizer.step(closure)

    with pytest.raises(UserError, match="gradient of this rank alone"):
        loop.run.train_step([1], loop.loss, update)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_gradient_scaler_of_which_each_rank_has_its_own_is_refused(attach_live: Attach, is_enabled: bool) -> None:
    loop, scaler = Loop(attach_live), torch.amp.GradScaler("cpu", enabled=is_enabled)

    def update() -> None:
        scaler.step(loop.optimizer)
        scaler.update()

    def step() -> None:
        loop.run.train_step([1], lambda share: scaler.scale(loop.loss(share)), update)

    if not is_enabled:
        step()
        assert loop.run.step == 1
        return
    with pytest.raises(UserError, match="use bf16, which needs none"):
        step()


@pytest.mark.parametrize("next_call", ["train_step", "finish"])
def test_after_an_error_that_the_script_has_caught_no_call_meets_the_other_ranks(
    attach_live: Attach, next_call: str
) -> None:
    """They are still in the step: a collective of the next call would be taken for one of it."""
    loop = Loop(attach_live).train(until=1)
    with pytest.raises(ZeroDivisionError):
        loop.run.train_step([1], lambda share: 1 / 0, loop.optimizer.step)  # type: ignore[arg-type,return-value]
    calls = {"train_step": lambda: loop.run.train_step([1], loop.loss, loop.optimizer.step), "finish": loop.run.finish}
    with pytest.raises(UserError, match=rf"run\.{next_call}\(\) was called after an error"):
        calls[next_call]()


def test_an_update_may_leave_the_optimizer_out_once_it_has_been_in_it(attach_live: Attach) -> None:
    loop = Loop(attach_live)
    with pytest.raises(UserError, match=r"update\(\) has called no optimizer\.step\(\)"):
        loop.run.train_step([0, 1], loop.loss, lambda: None)
    loop = Loop(attach_live, environ={"DDPJOB_NAME": "other"}).train(until=2)
    weight = loop.model.weight.clone()  # type: ignore[operator]
    loop.run.train_step([0, 1], loop.loss, lambda: None)  # as one that finds its gradients infinite
    assert torch.equal(weight, loop.model.weight)  # type: ignore[arg-type]
    loop.run.train_step([0, 1], loop.loss, loop.optimizer.step)
    assert loop.run.step == 4
    assert not torch.equal(weight, loop.model.weight)  # type: ignore[arg-type]


def test_a_scheduler_that_is_stepped_between_steps_belongs_into_update(attach_live: Attach) -> None:
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run = attach_live(model, optimizer, scheduler=scheduler, global_batch=4)
    run.resume()
    run.train_step([1], lambda share: model(INPUTS[share]).square().mean(), optimizer.step)
    scheduler.step()
    with pytest.raises(UserError, match=r"scheduler\.step\(\) was called after the end of update\(\): a snapshot of"):
        run.train_step([2], lambda share: model(INPUTS[share]).square().mean(), optimizer.step)


def test_a_connection_that_loss_of_has_lost_is_no_lost_rank(attach_live: Attach) -> None:
    """As one to a storage: the ranks would take the step again and again."""
    loop = Loop(attach_live)
    loop.run._recovery = recovery = Mock(lost=Mock(side_effect=AssertionError))

    def loss_of(share: Tensor) -> Tensor:
        raise RuntimeError("reading shard 7: Connection closed by peer")

    with pytest.raises(RuntimeError, match="shard 7"):
        loop.run.train_step([1], loss_of, loop.optimizer.step)
    recovery.lost.assert_not_called()


def test_weights_of_a_broken_update_do_not_become_the_last_snapshot(attach_live: Attach) -> None:
    loop = Loop(attach_live).train(until=1)
    with pytest.raises(ZeroDivisionError):
        loop.run.train_step([1], loop.loss, lambda: (loop.optimizer.step(), 1 / 0))
    with pytest.raises(UserError, match="let the run end"):
        loop.run.finish()


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {}


class OnAGPU(nn.Linear):
    def parameters(self, recurse: bool = True) -> Any:
        yield torch.empty(0, device="meta")


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (OnAGPU(1, 1), {}, "on CPUs only"),
        (Extra(1, 1), {}, "get_extra_state"),
        (nn.Linear(1, 1), {"global_batch": 0}, "samples of a step"),
        (nn.Linear(1, 1), {"scaler": torch.amp.GradScaler("cpu")}, "bf16"),
        ([], {}, "no torch.nn.Module"),
    ],
)
def test_what_cannot_be_kept_equal_is_refused(
    attach_live: Attach, model: Any, settings: dict[str, Any], message: str
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with pytest.raises(UserError, match=message):
        attach_live(model, optimizer, **{"global_batch": 4, **settings})


def test_an_optimizer_whose_parameters_are_not_known_is_refused(attach_live: Attach) -> None:
    with pytest.raises(UserError, match=r"no torch\.optim\.Optimizer"):
        attach_live(nn.Linear(1, 1), nn.Linear(1, 1), global_batch=4)


def test_parameters_that_are_added_later_are_reset_in_each_step(attach_live: Attach) -> None:
    """As those that an optimizer has from the start: their gradients are summed over the ranks."""
    loop = Loop(attach_live).train(until=1)
    added = torch.ones(1, requires_grad=True)
    loop.optimizer.add_param_group({"params": [added]})
    for _ in range(2):
        loop.run.train_step([0], lambda share: loop.loss(share) + added.sum(), loop.optimizer.step)
        assert added.grad is not None
        assert float(added.grad) == 1.0


def head_alone() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of which the optimizer has one layer, though the other one requires a gradient too."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    return model, torch.optim.SGD(model[1].parameters(), lr=0.0)


def test_gradients_of_parameters_that_no_optimizer_has_are_those_of_one_step(attach_live: Attach) -> None:
    """An update that clips by the norm of all would else scale by more from step to step."""
    model, optimizer = head_alone()
    run = attach_live(model, optimizer, global_batch=4)
    run.resume()
    norms: list[float] = []

    def update() -> None:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()

    for _ in range(3):
        run.train_step([0, 1, 2, 3], lambda share: model(INPUTS[share]).square().mean(), update)
    assert norms == [norms[0]] * 3


def test_gradients_of_parameters_that_no_optimizer_has_are_summed_over_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that clip by the norm of all would else scale the same gradient by different factors, without a word."""
    summed: list[tuple[int, ...]] = []

    def all_reduce(tensor: Tensor, **_: Any) -> Mock:
        if tensor.is_floating_point():
            summed.append(tuple(tensor.shape))
        return Mock()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    model, optimizer = head_alone()
    passes = SharedPasses(World(rank=0, size=2), (model, optimizer), micro_batch=4, wait=lambda work: None)
    passes.gradient(torch.arange(4), lambda share: model(INPUTS[share]).square().mean(), 1, epoch_end=False)
    assert sorted(summed) == [(1,), (1, 3), (3,), (3, 4)]


def test_a_process_group_of_the_script_and_its_ddp_are_refused(
    attach_live: Attach, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(UserError, match=r"leave out init_process_group.*call attach_live.* once"):
        attach_live(model, optimizer, global_batch=4)
    wrapped = DistributedDataParallel(model)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(UserError, match="without DistributedDataParallel"):
        attach_live(wrapped, optimizer, global_batch=4)


def test_a_thread_beside_the_main_one_is_refused(attach_live: Attach) -> None:
    found: list[UserError] = []

    def attach() -> None:
        with pytest.raises(UserError) as error:
            attach_live(*model_and_optimizer(), global_batch=4)
        found.append(error.value)

    thread = threading.Thread(target=attach)
    thread.start()
    thread.join()
    assert "main thread" in str(found)


def test_with_scope_live_attach_says_what_to_do(attach: Callable[..., Any]) -> None:
    live = {"DDPJOB_LIVE": "true", "DDPJOB_PROCS_PER_NODE": "1", "DDPJOB_NODE_RANK": "0", "DDPJOB_NODES": "2"}
    with pytest.raises(UserError, match="attach_live"):
        attach(*model_and_optimizer(), environ={**live, "POD_IP": "127.0.0.1"})
