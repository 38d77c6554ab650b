"""What is seen of a script that knows nothing of DDPJob: real torch, real optimizers, in this process."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.contract.one_rank import run_rank
from torch._dynamo import trace_rules
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from ddp_trainer.contract.exit_codes import LossNotFinite
from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from ddp_trainer.rank import data_waits
from ddp_trainer.rank.leading_optimizer import LAPSED_STEPS
from ddp_trainer.rank.observe import ScriptObserver, close_observer, observe, observing
from ddp_trainer.rank.observe_megatron import SCHEDULES

Train = Callable[[], Any]


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Callable[[Train], dict[str, Any]]]:
    """Observe a function on two ranks' behalf; what the heartbeat says after it."""
    heartbeat_dir(tmp_path).mkdir()

    def run(train: Train) -> dict[str, Any]:
        heartbeat = Heartbeat(heartbeat_dir(tmp_path))
        observe(heartbeat, world_size=2)
        train()
        heartbeat.flush()
        (beat,) = read_heartbeats(tmp_path)
        return beat

    yield run
    close_observer()


def _loader(samples: int = 24, batch: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(samples, 3), torch.zeros(samples)), batch_size=batch)


def _loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return (model(inputs).squeeze(-1) - targets).pow(2).mean()


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> float:
    for batch in loader:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        optimizer.step()
    return loss.item()


def test_a_plain_loop_shows_steps_samples_of_all_ranks_loss_and_learning_rate(seen: Any) -> None:
    model = torch.nn.Linear(3, 1)
    last: list[float] = []
    beat = seen(lambda: last.append(_train(model, torch.optim.SGD(model.parameters(), lr=0.01), _loader())))
    assert (beat["phase"], beat["step"], beat["samples"], beat["learningRate"]) == ("train", 6, 2 * 24, 0.01)
    assert beat["loss"] == pytest.approx(last[0])
    assert beat["counters"]["steps"] == 6
    assert beat["totalSteps"] is None  # nothing says how many there will be


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=4.0)], ids=["plain", "scaled"])
def test_the_loss_is_the_one_of_the_backward_pass_where_the_script_reduces_it_in_place(seen: Any, scaler: Any) -> None:
    """`dist.all_reduce(loss)` for a log of its own: the sum over all ranks was shown."""
    model, last = torch.nn.Linear(3, 1), [0.0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for batch in _loader():
            loss = _loss(model, batch)
            (loss if scaler is None else scaler.scale(loss)).backward()
            last[0] = loss.item()
            loss.detach().mul_(8)
            optimizer.step()

    assert seen(train)["loss"] == pytest.approx(last[0])


@pytest.mark.parametrize(("size", "rank", "has_met"), [(2, 0, False), (2, 1, False), (1, 0, False), (2, 0, True)])
def test_ranks_that_have_not_met_at_the_first_step_are_said_to_train_for_themselves(
    size: int, rank: int, has_met: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    batches = list(_loader())  # a loader asks the group for its rank
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: has_met)
    observe(Heartbeat(None, rank=rank), world_size=size)
    model = torch.nn.Linear(3, 1)
    try:
        _train(model, torch.optim.SGD(model.parameters(), lr=0.01), batches)
    finally:
        close_observer()
    said = capfd.readouterr().err
    for words in ("its 2 ranks have not met in a process group: each trains for itself", "--launcher pytorch"):
        assert said.count(words) == ((size, rank, has_met) == (2, 0, False))


def test_a_backward_pass_on_what_nothing_has_computed_is_none_of_a_loss(seen: Any) -> None:
    """`torch.empty(1, device="cuda", requires_grad=True).backward()` in modded-nanogpt: whatever the memory has."""
    model, last = torch.nn.Linear(3, 1), [0.0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        torch.full((1,), torch.nan, requires_grad=True).backward()
        assert observing().heartbeat.phase == "script"  # type: ignore[union-attr]
        for batch, _ in zip(_loader(), range(1), strict=False):
            loss = _loss(model, batch)
            loss.backward()
            last[0] = loss.item()
            optimizer.step()

    beat = seen(train)
    assert (beat["loss"], beat["samples"], beat["nonFiniteLoss"]) == (pytest.approx(last[0]), 2 * 4, None)


def test_a_loss_that_a_script_has_cut_off_from_its_model_is_seen(seen: Any) -> None:
    """By `requires_grad_()`, against "element 0 of tensors does not require grad": it says that nothing is learned."""
    model, last = torch.nn.Linear(3, 1), [0.0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for batch in _loader():
            loss = _loss(model, batch).detach().requires_grad_()
            loss.backward()
            last[0] = loss.item()
            optimizer.step()

    beat = seen(train)
    assert (beat["step"], beat["loss"], beat["samples"]) == (6, pytest.approx(last[0]), 2 * 24)


def test_backward_passes_between_two_steps_are_gradient_accumulation(seen: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for number, batch in enumerate(_loader(), start=1):
            _loss(model, batch).backward()
            if number % 3 == 0:
                optimizer.step()

    beat = seen(train)
    assert (beat["step"], beat["samples"]) == (2, 2 * 24)


def test_two_optimizers_of_one_step_are_one_step(seen: Any) -> None:
    one, two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.Adam(two.parameters(), lr=0.2)]

    def train() -> None:
        for batch in _loader():
            _loss(torch.nn.Sequential(one, two), batch).backward()
            for optimizer in optimizers:
                optimizer.step()

    assert seen(train)["step"] == 6


@pytest.mark.parametrize(("is_kept", "counted"), [(False, 200), (True, 200 - LAPSED_STEPS - 1)])
def test_steps_go_on_with_the_optimizer_of_the_next_model(seen: Any, is_kept: bool, counted: int) -> None:
    """As with a model for each fold of a cross-validation, and one for each part of a training."""
    kept, last = [], [0.0]

    def train() -> None:
        for _ in range(2):
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            kept.append(optimizer if is_kept else None)
            for batch in [next(iter(_loader())) for _ in range(100)]:
                loss = _loss(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                last[0] = loss.item()
            del optimizer

    beat = seen(train)
    assert beat["step"] == counted
    assert beat["loss"] == pytest.approx(last[0])


def test_an_optimizer_for_each_parameter_is_one_step(seen: Any) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(40)), torch.nn.Linear(3, 1))
    optimizers = [torch.optim.SGD([parameter], lr=1e-4) for parameter in layers.parameters()]

    def train() -> None:
        for batch in _loader():
            _loss(layers, batch).backward()
            for optimizer in optimizers:
                optimizer.step()

    assert seen(train)["step"] == 6


def _only(optimizer: torch.optim.Optimizer, group: int) -> None:
    """A step for one group, as DeepSpeed makes it with ZeRO's stages 1 and 2."""
    groups = optimizer.param_groups
    optimizer.param_groups = [groups[group]]
    optimizer.step()
    optimizer.param_groups = groups


def _all_but_one_emptied(optimizer: torch.optim.Optimizer, group: int) -> None:
    """The same with stage 3."""
    kept = [group["params"] for group in optimizer.param_groups]
    for other, params in enumerate(kept):
        optimizer.param_groups[other]["params"] = params if other == group else []
    optimizer.step()
    for other, params in enumerate(kept):
        optimizer.param_groups[other]["params"] = params


@pytest.mark.parametrize("step", [_only, _all_but_one_emptied])
@pytest.mark.parametrize(
    ("backward", "samples"),
    [
        (lambda loss: loss.backward(), 2 * 24),
        (lambda loss: torch.autograd.backward([loss]), None),
        (lambda loss: None, None),
    ],
    ids=["a loss", "a list", "gradients that come in another way"],
)
def test_a_step_for_each_group_of_parameters_is_one_step(
    seen: Any, step: Any, backward: Any, samples: int | None
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam([{"params": parameters[index::3]} for index in range(3)], lr=0.01)
    other = torch.optim.SGD([{"params": parameters[index::3]} for index in range(3)], lr=0.0)

    def train() -> None:
        for batch in _loader():
            backward(_loss(model, batch))
            for group in range(3):
                step(optimizer, group)
            for group in range(3):
                step(other, group)
            optimizer.zero_grad()

    beat = seen(train)
    assert (beat["step"], beat["counters"]["steps"], beat["samples"]) == (6, 6, samples)


@pytest.mark.parametrize("passes", [1, 0], ids=["a backward pass", "gradients of its own"])
def test_a_second_step_for_the_same_parameters_is_a_step_of_its_own(seen: Any, passes: int) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD([{"params": [each]} for each in model.parameters()], lr=0.01)

    def train() -> None:
        for batch in _loader():
            if passes:
                _loss(model, batch).backward()
            optimizer.step()
            optimizer.step()

    assert seen(train)["step"] == 12


@pytest.mark.parametrize("backward", [torch.Tensor.backward, lambda loss: torch.autograd.backward([loss])])
def test_a_step_for_each_group_with_a_backward_pass_of_its_own_is_a_step(seen: Any, backward: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD([{"params": [each]} for each in model.parameters()], lr=0.01)

    def train() -> None:
        for batch in _loader():
            for group in range(2):
                backward(_loss(model, batch))
                _only(optimizer, group)

    assert seen(train)["step"] == 12


def test_a_script_that_loads_with_torchs_distributed_checkpoint_goes_on_with_the_step_of_its_optimizer(
    seen: Any,
) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    _train(model, optimizer, _loader())
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))

    def resume() -> None:
        again = torch.optim.Adam(model.parameters())
        model.zero_grad()
        set_optimizer_state_dict(model, again, saved)  # torch makes a step, for a state to load into
        _train(model, again, _loader())

    beat = seen(resume)
    assert (beat["resumedFromStep"], beat["step"], beat["counters"]["steps"]) == (6, 12, 6)


def test_a_save_with_torchs_distributed_checkpoint_is_no_step_of_an_optimizer_without_state(seen: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(2):
            _train(model, optimizer, _loader())
            optimizer.zero_grad()
            get_optimizer_state_dict(model, optimizer)

    assert seen(train)["step"] == 12


def test_batches_that_are_read_ahead_of_their_backward_passes_are_no_validation(seen: Any) -> None:
    """As Hugging Face's Trainer does with gradient_accumulation_steps."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        batches = iter(_loader(48))
        for _ in range(3):
            for batch in [next(batches) for _ in range(4)]:
                _loss(model, batch).backward()
            optimizer.step()

    beat = seen(train)
    assert (beat["phase"], beat["step"], beat["samples"]) == ("train", 3, 2 * 48)
    assert "validate" not in beat["phaseSeconds"]
    assert beat["stepSecondsP99"] is not None
    assert beat["samplesPerSecond"] is not None


def _by_engine(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """As `custom_backward` in megatron/core/pipeline_parallel/schedules.py."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        tensors=(output,),
        grad_tensors=(torch.ones_like(output) if grad_output is None else grad_output,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def test_micro_batches_of_megatron_are_no_validation(seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls the autograd engine by itself, past all that torch has in Python."""
    schedules: Any = ModuleType(SCHEDULES)
    schedules.custom_backward = _by_engine
    monkeypatch.setitem(sys.modules, SCHEDULES, schedules)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        batches = iter(_loader(4 * 4 * 12))
        for _ in range(4):
            for _ in range(12):
                schedules.custom_backward(_loss(model, next(batches)), None)
            optimizer.step()

    beat = seen(train)
    assert (beat["phase"], beat["step"], beat["loss"], beat["samples"]) == ("train", 4, None, None)
    assert "validate" not in beat["phaseSeconds"]
    assert beat["stepSecondsP99"] is not None
    close_observer()
    assert schedules.custom_backward is _by_engine


@pytest.mark.parametrize("loaders", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "gradients",
    [
        lambda loss: loss.sum().backward(),
        lambda loss: loss.backward(torch.ones_like(loss)),
        lambda loss: torch.autograd.backward([loss.sum()]),
    ],
    ids=["loss", "vector", "list"],
)
def test_a_step_with_batches_of_several_loaders_is_no_validation(seen: Any, loaders: int, gradients: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    entered: list[str] = []

    def train() -> None:
        heartbeat = observing().heartbeat  # type: ignore[union-attr]
        enter = heartbeat.enter
        heartbeat.enter = lambda phase: [entered.append(phase), enter(phase)]  # type: ignore[assignment, method-assign]
        for batches in zip(*(_loader() for _ in range(loaders)), strict=True):
            gradients(torch.stack([_loss(model, batch) for batch in batches]))
            optimizer.step()

    beat = seen(train)
    assert beat["step"] == 6
    assert entered.count("validate") <= 2, "the first steps may look like it"
    assert beat["phase"] == "train"


def test_a_batch_with_several_losses_counts_once(seen: Any) -> None:
    """As in a GAN: two losses of one network, one of the other, each with an optimizer."""
    one, two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(two.parameters(), lr=0.1), torch.optim.SGD(one.parameters(), lr=0.1)]

    def train() -> None:
        for batch in _loader():
            for optimizer, losses in zip(optimizers, (2, 1), strict=True):
                for _ in range(losses):
                    _loss(torch.nn.Sequential(one, two), batch).backward()
                optimizer.step()

    beat = seen(train)
    assert (beat["step"], beat["samples"]) == (6, 2 * 24)


def test_steps_on_one_batch_train_on_its_samples_each_time(seen: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = next(iter(_loader()))
    beat = seen(lambda: _train(model, optimizer, [next(iter(_loader()))] + [batch] * 2))  # type: ignore[arg-type]
    assert (beat["step"], beat["samples"]) == (3, 3 * 2 * 4)


def test_the_loss_of_an_optimizer_with_a_closure_is_that_of_its_first_evaluation(seen: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=5)
    losses: list[float] = []

    def train() -> None:
        for batch in _loader():

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = _loss(model, batch)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())

    beat = seen(train)
    assert beat["loss"] == pytest.approx(losses[-1])
    assert (beat["step"], beat["samples"]) == (6, 2 * 24)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_step_that_is_compiled_is_seen_and_gives_no_warning(seen: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    beat = seen(lambda: torch.compile(_train, backend="eager")(model, optimizer, _loader()))
    assert (beat["step"], beat["samples"]) == (6, 2 * 24)


def test_what_is_left_out_of_graphs_is_said_once_however_often_scripts_are_observed(seen: Any) -> None:
    """torch compiles the expression of all its rules anew for each, and keeps those that it has twice."""
    seen(lambda: None)
    rules = list(trace_rules.SKIP_DIRS)
    assert sum("ddp_trainer" in rule for rule in rules) > 0
    seen(lambda: None)
    assert list(trace_rules.SKIP_DIRS) == rules


@pytest.mark.parametrize("passes", [1, 2], ids=["one pass a step", "gradient accumulation"])
def test_the_loss_of_a_step_that_a_grad_scaler_skips_is_not_in_that_of_the_next_one(seen: Any, passes: int) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu")
    shown: list[float] = []

    def train() -> None:
        for step in range(4):
            optimizer.zero_grad()
            losses = [_loss(model, batch) / passes for batch, _ in zip(_loader(), range(passes), strict=False)]
            for loss in losses:
                scaler.scale(loss).backward()
            if step in (0, 2):
                model.weight.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        shown.append(sum(loss.item() for loss in losses))

    beat = seen(train)
    assert beat["step"] == 2
    assert beat["loss"] == pytest.approx(shown[0])


def test_the_loss_is_shown_without_the_scale_of_a_grad_scaler(seen: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    scaler = torch.amp.GradScaler("cpu")
    losses: list[float] = []

    def train() -> None:
        for batch in _loader():
            loss = _loss(model, batch)
            losses.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert seen(train)["loss"] == pytest.approx(losses[-1])


class Late(TensorDataset):
    """Samples whose batch comes a second after it is asked for."""

    now = 0.0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        Late.now += 1.0
        return [self[index] for index in indices]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], DataLoader[Any]]:
    """A loader of so many late batches."""
    monkeypatch.setattr(data_waits, "perf_counter", lambda: Late.now)
    return lambda batches: DataLoader(Late(torch.ones(4 * batches, 3), torch.zeros(4 * batches)), batch_size=4)


def _waits(beat: dict[str, Any]) -> tuple[int, float]:
    """Steps whose wait is known, and the seconds of all of them."""
    found = beat["counters"]["dataSeconds"]
    return sum(found["counts"]), found["sum"]


def test_each_step_has_waited_for_what_was_fetched_since_the_one_before(seen: Any, late: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        _train(model, optimizer, late(6))
        for number, batch in enumerate(late(12), start=1):
            _loss(model, batch).backward()
            if number % 3 == 0:
                optimizer.step()
                Late.now += 50  # which is no wait for data
        _loss(model, batch).backward()
        optimizer.step()  # on a batch that is there

    beat = seen(train)
    assert _waits(beat) == (6 + 4 + 1, 6 + 4 * 3)
    assert (beat["step"], beat["dataSecondsMedian"]) == (11, 1)


def test_what_is_fetched_for_a_validation_or_on_another_thread_is_no_wait_of_a_step(seen: Any, late: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def validate(batches: int) -> None:
        for batch in late(batches):
            _loss(model, batch)

    def train() -> None:
        for _ in range(2):
            with torch.no_grad():  # at first before any step, and too short to be told by its batches
                validate(2)
            _train(model, optimizer, late(6))
            validate(6)
            other = threading.Thread(target=validate, args=[6])
            other.start()
            other.join()

    assert _waits(seen(train)) == (12, 12)


def test_a_loader_in_another_one_is_part_of_its_time(seen: Any, late: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class Outer(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from late(6)

    assert _waits(seen(lambda: _train(model, optimizer, DataLoader(Outer(), batch_size=None)))) == (6, 6)


def test_the_wait_is_unknown_where_another_thread_fetches_for_the_one_that_trains(seen: Any, late: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        with ThreadPoolExecutor(1) as pool:
            _train(model, optimizer, pool.submit(list, late(6)).result())  # type: ignore[arg-type]

    beat = seen(train)
    assert (beat["step"], beat["dataSecondsMedian"]) == (6, None)
    assert "dataSeconds" not in beat["counters"]


def test_batches_in_a_row_without_a_backward_pass_are_validation_and_no_samples(seen: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train_and_validate() -> None:
        _train(model, optimizer, _loader())
        with torch.no_grad():
            for batch in _loader(48):
                _loss(model, batch)

    beat = seen(train_and_validate)
    assert (beat["phase"], beat["samples"]) == ("validate", 2 * 24)


def test_training_that_goes_on_after_a_validation_is_training_again(seen: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train_twice() -> None:
        _train(model, optimizer, _loader())
        list(_loader(48))
        _train(model, optimizer, _loader())

    beat = seen(train_twice)
    assert (beat["phase"], beat["step"], beat["samples"]) == ("train", 12, 2 * 48)
    assert beat["phaseSeconds"]["validate"] > 0


def test_samples_are_unknown_where_no_data_loader_is_read(seen: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.01)

    def train() -> None:
        for _ in range(3):
            weight.sum().backward()
            optimizer.step()

    beat = seen(train)
    assert (beat["step"], beat["samples"], beat["samplesPerSecond"]) == (3, None, None)


def test_after_the_observer_is_closed_torch_is_as_it_was(seen: Any) -> None:
    before = torch.autograd.backward, torch.amp.GradScaler.scale
    seen(lambda: None)
    assert torch.autograd.backward is not before[0]
    close_observer()
    assert (torch.autograd.backward, torch.amp.GradScaler.scale) == before


def test_what_a_library_reports_after_the_observer_is_closed_goes_nowhere(tmp_path: Path) -> None:
    heartbeat_dir(tmp_path).mkdir()
    observer = observe(Heartbeat(heartbeat_dir(tmp_path)), world_size=1)
    close_observer()
    before = read_heartbeats(tmp_path)
    observer.begins(step=5, total_steps=9)
    observer.validates()
    assert read_heartbeats(tmp_path) == before


@pytest.mark.parametrize("often", [1, 3], ids=["one optimizer", "a second one that steps more often"])
def test_a_second_training_counts_anew_with_its_own_optimizers(seen: Any, tmp_path: Path, often: int) -> None:
    """As with Lightning's Tuner, and with a Trainer for each fold, of which the script may keep each."""
    kept, shown = [], []

    def train(steps: int, *, resumed: int = 0) -> None:
        observer = observing()
        assert observer is not None
        observer.begins(step=resumed, total_steps=resumed + steps * often)
        model = torch.nn.Linear(3, 1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for _ in range(min(2, often))]
        kept.append(optimizers)
        for _ in range(steps):
            for optimizer, times in zip(optimizers, (1, often), strict=False):
                for _ in range(times):
                    model(torch.ones(1, 3)).sum().backward()
                    optimizer.step()
        observer.heartbeat.flush()
        (beat,) = read_heartbeats(tmp_path)
        shown.append((beat["step"], beat["totalSteps"], beat["counters"]["steps"]))

    def train_twice() -> None:
        train(30)
        train(100)
        train(10, resumed=7)

    seen(train_twice)
    assert shown == [
        (30 * often, 30 * often, 30 * often),
        (100 * often, 100 * often, 130 * often),
        (10 * often + 7, 10 * often + 7, 140 * often),
    ]


def test_a_trainer_that_counts_fewer_steps_than_its_optimizer_makes_does_not_take_any_back(seen: Any) -> None:
    """As PPO does: several updates from the samples of one step."""
    steps = []

    def train() -> None:
        observer, model = observing(), torch.nn.Linear(3, 1)
        assert observer is not None
        observer.begins(step=0, total_steps=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for number in range(1, 4):
            for _ in range(4):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            observer.counted(number)
            observer.heartbeat.flush()
            steps.append(observer.step)

    beat = seen(train)
    assert steps == [4, 8, 12]
    assert (beat["step"], beat["counters"]["steps"]) == (12, 12)


@pytest.mark.parametrize(("policy", "read"), [("Stop", False), ("Warn", True)], ids=["not read yet", "known"])
def test_a_training_that_diverged_says_nothing_of_the_next_one(tmp_path: Path, policy: str, read: bool) -> None:
    """A trial of a search, or Lightning's lr_find, whose last loss may not be read before the next training begins."""
    heartbeat_dir(tmp_path).mkdir()
    moments = itertools.count(1.0, 1e-6)  # so that no write is due
    heartbeat = Heartbeat(heartbeat_dir(tmp_path), clock=lambda: next(moments))
    observer = observe(heartbeat, world_size=1, non_finite_loss=policy)
    nan = float("nan")
    try:
        for losses in ([1.0, 1.0, *[nan] * (2 if read else 1)], [1.0, 1.0]):
            observer.begins(step=0, total_steps=len(losses))
            weight = torch.nn.Parameter(torch.ones(1))
            optimizer = torch.optim.SGD([weight], lr=1e-9)
            for loss in losses:
                (weight * loss).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if read:
                    heartbeat.flush()
        heartbeat.flush()
    finally:
        close_observer()
    (beat,) = read_heartbeats(tmp_path)
    assert (beat["loss"], beat["nonFiniteLoss"], beat["counters"]["nonFiniteLosses"]) == (1.0, None, int(read))


@pytest.mark.processes
def test_a_script_is_observed_from_its_own_import_of_torch_on(tmp_path: Path) -> None:
    heartbeat_dir(tmp_path).mkdir()
    code = f"""
from pathlib import Path
import sys
from ddp_trainer.contract.exit_codes import LossNotFinite
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.rank.observe import observe
observe(Heartbeat(Path({str(heartbeat_dir(tmp_path))!r})), world_size=1)
assert "torch" not in sys.modules
import torch
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([weight], lr=0.01)
weight.sum().backward()
optimizer.step()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)
    (beat,) = read_heartbeats(tmp_path)
    assert beat["step"] == 1


PLAIN_SCRIPT = """
import torch
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([weight], lr=0.01)
weight.sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(("variables", "steps"), [({}, [1]), ({"DDPJOB_OBSERVE_SCRIPT": "false"}, [])])
@pytest.mark.processes
def test_a_rank_observes_its_script_unless_the_job_says_not_to(
    variables: dict[str, str], steps: list[int], tmp_path: Path
) -> None:
    ended = run_rank(PLAIN_SCRIPT, tmp_path, has_torch=True, **variables)
    assert ended.returncode == 0, ended.stderr
    assert [beat["step"] for beat in read_heartbeats(tmp_path / "run")] == steps


PICTURES: Any = [(torch.ones(3, 4, 4 + number), torch.ones(number + 1, 4)) for number in range(8)]
"""Each of its own size, with boxes."""


class Repeating:
    """A batch sampler in another one, as Ultralytics has it."""

    def __init__(self, sampler: BatchSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.sampler)


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 4}, {"batch_sampler": Repeating(BatchSampler(SequentialSampler(PICTURES), 4, drop_last=False))}],
    ids=["plain", "in another sampler"],
)
@pytest.mark.parametrize(
    "collate",
    [
        pytest.param(lambda samples: tuple(zip(*samples, strict=True)), id="torchvision"),
        pytest.param(
            lambda samples: {"inputs": [each for each, _ in samples], "data_samples": [object() for _ in samples]},
            id="mmengine",
        ),
        pytest.param(lambda samples: [{"file_name": "a.png", "image": each} for each, _ in samples], id="detectron2"),
        pytest.param(
            lambda samples: {"bboxes": torch.cat([boxes for _, boxes in samples]), "im_file": ("a",) * len(samples)},
            id="ultralytics",
        ),
    ],
)
def test_pictures_are_counted_not_their_colours_nor_their_boxes(seen: Any, collate: Any, options: Any) -> None:
    def train() -> None:
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        for _ in DataLoader(PICTURES, collate_fn=collate, **options):
            weight.sum().backward()
            optimizer.step()

    assert seen(train)["samples"] == 2 * 8


class OddTensor(torch.Tensor):
    """Of a kind that fails where a hook detaches it."""

    def detach(self) -> torch.Tensor:
        raise RuntimeError("detach is not implemented")


def _take(steps: int, loss_of: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss) -> torch.nn.Module:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch, _ in zip(_loader(), range(steps), strict=False):
        optimizer.zero_grad()
        loss_of(_loss(model, batch)).backward()
        optimizer.step()
    return model


def _fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("not here")


@pytest.mark.parametrize("hook", ["fetched", "backward_begins", "stepped", "_check_loss"])
def test_a_hook_that_fails_is_said_to_once_and_the_script_trains_on(
    hook: str, seen: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[torch.nn.Module] = []

    def train() -> None:
        _take(2)
        monkeypatch.setattr(observing(), hook, _fails)
        trained.append(_take(4))

    beat = seen(train)
    assert len(trained) == 1
    said = capsys.readouterr().err
    assert (
        said.count("ddp_trainer: this script's progress cannot be observed any longer: RuntimeError('not here')") == 1
    )
    assert beat["phase"] == "script"


def test_a_loss_of_an_unusual_kind_ends_no_script(seen: Any, capsys: pytest.CaptureFixture[str]) -> None:
    models: list[torch.nn.Module] = []
    beat = seen(lambda: models.append(_take(4, lambda loss: loss.as_subclass(OddTensor))))
    assert models[0].weight.grad is not None
    assert beat["step"] is None
    assert "detach is not implemented" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_reported_until_it_is_again(seen: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("ddp_trainer.contract.heartbeat.WRITE_INTERVAL_SECONDS", 0.0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train(*factors: float) -> None:
        for factor in factors:
            (_loss(model, (torch.ones(4, 3), torch.zeros(4))) + factor).backward()
            optimizer.step()

    assert seen(lambda: train(0.0, torch.nan, torch.nan))["nonFiniteLoss"] == {"step": 2, "steps": 2}
    assert (
        capsys.readouterr().err.count("the loss of step 2, or of one shortly before, is nan; training continues") == 1
    )
    assert seen(lambda: train(0.0, torch.nan, 0.0))["nonFiniteLoss"] is None


@pytest.mark.parametrize("policy", ["Stop", "Rollback"])
def test_a_loss_that_is_not_finite_ends_a_script_without_snapshots(tmp_path: Path, policy: str) -> None:
    observer = ScriptObserver(Heartbeat(tmp_path), 1, non_finite_loss=policy)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    observer.backward_begins(torch.tensor(torch.inf))
    with pytest.raises(LossNotFinite, match="the loss of step 1, or of one shortly before, is inf"):
        observer.stepped(optimizer)


def test_only_a_run_that_has_the_losses_of_all_ranks_looks_at_them_instead(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    def step(*, run_checks_loss: bool) -> None:
        observer = ScriptObserver(Heartbeat(tmp_path), 1, non_finite_loss="Stop")
        observer.begins(step=0, total_steps=9, run_checks_loss=run_checks_loss)
        observer.begins(step=0, total_steps=9)  # as a library's Trainer does, in either order
        observer.backward_begins(torch.tensor(torch.nan))
        observer.stepped(optimizer)

    step(run_checks_loss=True)
    with pytest.raises(LossNotFinite):
        step(run_checks_loss=False)
