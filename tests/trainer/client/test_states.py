"""What `attach` saves and restores, and which states it refuses before training."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.trainer.client.one_rank import model_and_optimizer, step
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import RandomSampler

import ddp_trainer
from ddp_trainer.client.states import prepared
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots.codec.loading import load_into
from ddp_trainer.snapshots.trust.disk import Disk
from ddpjob_operator.core.failure.detect import Failure, Retry
from ddpjob_operator.core.failure.diagnosis import diagnose


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


class Own:
    """A state of a program, which copies what it saves."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.parameter.detach().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parameter.data.copy_(state["scale"])


@pytest.mark.parametrize("by", [ddp_trainer.attach, ddp_trainer.attach_live])
def test_a_parameter_that_no_snapshot_would_hold_is_refused(attach: Any, by: Callable[..., Any]) -> None:
    """It would begin anew after a restart, with the moments that the optimizer had for the old one."""
    model, head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    with pytest.raises(UserError, match=r"optimizer trains a parameter of shape \(1, 4\) .*pass its module by name"):
        attach(model, optimizer, by=by, global_batch=4)
    attach(model, optimizer, head=head, by=by, global_batch=4)


def test_a_parameter_in_a_state_of_the_programs_own_is_not_refused(attach: Any) -> None:
    model, scale = nn.Linear(4, 4), nn.Parameter(torch.ones(3))
    attach(model, torch.optim.Adam([*model.parameters(), scale]), scale=Own(scale))


def test_a_state_whose_name_is_that_of_no_file_is_refused(attach: Any) -> None:
    """No save would have come to its end."""
    with pytest.raises(UserError, match=r"'ema/0\.999' cannot be: leave out the slash"):
        attach(*model_and_optimizer(), **{"ema/0.999": nn.Linear(4, 1)})


def test_a_state_without_a_file_may_have_a_slash_in_its_name(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    attach(model, optimizer, per_rank={"data/train": schedule}, **{"schedule/lr": schedule})


class Loader:
    """Has the state of its iterator, and makes one where there is none, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.epoch = 0
        self.sampler = RandomSampler(range(4), generator=torch.Generator())
        self.next_iter_state: dict[str, int] | None = None
        self._iterator: dict[str, int] | None = None

    def __iter__(self) -> Iterator[int]:
        return iter([self.state_dict()["epoch"]])

    def state_dict(self) -> dict[str, int]:
        if self._iterator is None:
            drawn = torch.randint(9, ()) + torch.randint(9, (), generator=self.sampler.generator)
            self._iterator = self.next_iter_state or {"epoch": self.epoch, "drawn": int(drawn)}
            self.next_iter_state = None
        return self._iterator

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._iterator = None
        if state:
            self.next_iter_state = state


def test_the_epoch_that_is_set_after_attach_is_that_of_a_data_loader_with_a_state(
    attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchdata: Any = ModuleType("torchdata.stateful_dataloader")
    torchdata.StatefulDataLoader = Loader
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", torchdata)
    loader, begun, resumed = Loader(), Loader(), Loader()
    batches = iter(begun)
    resumed.load_state_dict({"epoch": 7})
    attach(*model_and_optimizer(), per_rank={"loader": loader, "begun": begun, "resumed": resumed})
    loader.epoch = begun.epoch = resumed.epoch = 1
    assert list(loader) == [1]
    assert list(batches) == [0]
    assert begun.state_dict()["epoch"] == 0, "the iterator that the script has is the one that is saved"
    assert list(resumed) == [7], "the state that the script has loaded itself"


def test_a_data_loader_that_is_attached_shuffles_as_it_would_without(monkeypatch: pytest.MonkeyPatch) -> None:
    torchdata: Any = ModuleType("torchdata.stateful_dataloader")
    torchdata.StatefulDataLoader = Loader
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", torchdata)
    loader = Loader()
    before, own = torch.get_rng_state(), loader.sampler.generator.get_state()
    prepared({}, {"loader": loader}, ())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(loader.sampler.generator.get_state(), own)


def test_a_frozen_parameter_in_no_state_is_not_refused(attach: Any) -> None:
    model, frozen = nn.Linear(4, 4), nn.Parameter(torch.ones(3), requires_grad=False)
    attach(model, torch.optim.Adam([*model.parameters(), frozen]))


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


class InBfloat16(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.bfloat16()).float()


def transposed() -> dict[str, Any]:
    """A fused optimizer goes through the memory of a weight and its moments from one end to the other."""
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(torch.randn(4, 3).t())
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)}


def more_exact_than_its_weights() -> dict[str, Any]:
    """One of its states is of float32 whatever the weights are of."""
    model = InBfloat16(4, 3, dtype=torch.bfloat16)
    return {"model": model, "optimizer": torch.optim.NAdam(model.parameters(), lr=0.1)}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}").items()}
    if isinstance(value, list | tuple):
        return flat(dict(enumerate(value)), path)
    return {path: value.tolist() if isinstance(value, torch.Tensor) else value}


@pytest.mark.parametrize("make", [all_kinds, with_accelerate, transposed, more_exact_than_its_weights])
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


@pytest.mark.parametrize("types", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_program_that_has_its_weights_in_another_type_now_goes_on(attach: Any, types: Any) -> None:
    """Their moments come along, as torch has them."""
    for dtype, until in zip(types, (3, 6), strict=True):
        model = nn.Linear(4, 3, dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run = attach(model, optimizer)
        began = run.resume()
        for _ in range(began, until):
            optimizer.zero_grad()
            model(torch.ones(2, 4, dtype=dtype)).sum().backward()
            optimizer.step()
            run.step_end(0.5)
        run.finish()
    assert began == 3
    assert optimizer.state[model.weight]["exp_avg"].dtype == types[1]


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, whose state it shares, as libraries have them: with few of the hooks."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.defaults, self.param_groups = base, base.defaults, base.param_groups
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)


def test_an_optimizer_around_another_one_takes_over_its_state() -> None:
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    state = optimizer.state_dict()
    _, other = model_and_optimizer()
    load_into(Lookahead(other), state)
    assert flat(other.state_dict()) == flat(state)


def test_a_learning_rate_on_a_device_comes_back_to_it() -> None:
    """Where the replays of a CUDA graph read it; here the device is one that every machine has."""
    _, optimizer = model_and_optimizer()
    state = optimizer.state_dict()
    state["param_groups"][0]["rate"] = torch.tensor(0.5)
    optimizer.param_groups[0]["rate"] = torch.empty((), device="meta")
    load_into(optimizer, state)
    assert optimizer.param_groups[0]["rate"].device.type == "meta"


def rates_of_epochs(attach: Any, until: int) -> tuple[list[float], int]:
    """Train to a step, two of them an epoch; the learning rate of each step, and the finished epochs."""
    model, optimizer = model_and_optimizer()
    scheduler = LambdaLR(optimizer, lambda epoch: 0.1**epoch)
    run = attach(model, optimizer, scheduler=scheduler)
    rates = []
    for number in range(run.resume(), until):
        rates.append(optimizer.param_groups[0]["lr"])
        loss = step(model, optimizer)
        is_last = number % 2 == 1
        if is_last:
            scheduler.step()
        run.step_end(loss, epoch_end=is_last)
    run.finish()
    return rates, run.epoch


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_scheduler_that_moves_once_an_epoch_goes_on_where_it_was(attach: Any, stop: int) -> None:
    before, _ = rates_of_epochs(attach, stop)
    after, epochs = rates_of_epochs(attach, 6)
    assert [*before, *after] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert epochs == 3


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


def test_a_model_with_layers_of_four_bits_is_refused_by_name_with_the_way_out(
    attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized: Any = ModuleType("bitsandbytes.nn")
    quantized.Linear4bit = type("Linear4bit", (nn.Linear,), {})
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", quantized)
    model = nn.Sequential(quantized.Linear4bit(2, 2), nn.Linear(2, 2))
    text = refusal(attach, model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    assert text.startswith("model cannot be saved in a snapshot: a layer of 4 bits of bitsandbytes, as QLoRA has them")
    assert "run.checkpoint()" in text


class Unsavable:
    def state_dict(self) -> dict[str, Any]:
        return {"function": print}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_a_state_that_no_snapshot_can_hold_is_refused_before_training(attach: Any) -> None:
    text = refusal(attach, *model_and_optimizer(), loader=Unsavable())
    assert "loader cannot be saved in a snapshot: loader.function is a builtins.builtin_function_or_method" in text


def test_a_tensor_that_no_snapshot_can_hold_is_refused_before_training(attach: Any) -> None:
    model = nn.Linear(2, 2, dtype=torch.complex128)
    text = refusal(attach, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "model cannot be saved in a snapshot: model.bias is a torch.strided tensor of torch.complex128" in text
    model, optimizer = model_and_optimizer()
    model.register_buffer("edges", torch.eye(2).to_sparse())
    assert "model.edges is a torch.sparse_coo tensor of torch.float32" in refusal(attach, model, optimizer)


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
