"""An exception leaves a snapshot of the last finished step behind, or says why it cannot."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ddp_trainer.contract.exit_codes import FencedError
from ddp_trainer.snapshots import boundary
from ddp_trainer.snapshots.codec.state import Stateful
from ddp_trainer.snapshots.session import Identity, Progress, SaveInterval, SnapshotEvent, Snapshots
from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.fence import Fence


class Cursor:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step = state["step"]


class Broken(Exception):
    """What goes wrong in a step."""


class Run:
    """Dropout and BatchNorm, so that the forward pass of a step that fails leaves its traces."""

    def __init__(
        self, directory: Path, *, attempt: int = 0, every: str = "3steps", seed: int = 0, **settings: Any
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.cursor = Cursor()
        self.events: list[SnapshotEvent] = []
        states: dict[str, Stateful] = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        settings = {"keep": 9, "changes_with_optimizer": ("cursor",)} | settings
        self.snapshots = Snapshots(
            directory,
            {**states, "cursor": self.cursor, **settings.pop("states", {})},
            every=SaveInterval.parse(every),
            identity=Identity("digits", "uid-1", 1, attempt, 0, 1),
            strategy="single",
            global_batch=16,
            on_event=self.events.append,
            **settings,
        )
        self.snapshots.resume()

    def train(self, until: int, *, fail: str = "") -> bool | None:
        """Train; at `fail` of step `until` raise, and give what became of the emergency snapshot."""
        try:
            while self.cursor.step < until:
                at = fail if self.cursor.step == until - 1 else ""
                self.optimizer.zero_grad()
                loss = self.model(torch.randn(16, 8)).square().mean()
                if at == "forward":
                    raise Broken
                loss.backward()
                if at == "backward":
                    raise Broken
                self.optimizer.step()
                if at == "update":
                    raise Broken
                self.scheduler.step()
                self.cursor.step += 1
                self.snapshots.step_end(Progress(self.cursor.step, 0, self.cursor.step * 16))
        except Broken as error:
            return self.snapshots.emergency(error)
        finally:
            self.snapshots.close()
        return None

    def tensors(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.state_dict()["state"]
        moments = {f"{key}.{name}": value for key, values in state.items() for name, value in values.items()}
        return {**self.model.state_dict(), **moments}

    def results(self) -> list[tuple[str, int]]:
        return [(event.result, event.step) for event in self.events]


def test_a_look_at_the_weights_that_fails_too_takes_nothing_from_the_failure(tmp_path: Path) -> None:
    """As after a fault of a device: whatever asks it for something gets the same error."""

    def looks_at_weights() -> bool:
        if run.cursor.step == 5:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return True

    run = Run(tmp_path, loss_is_finite=looks_at_weights)
    assert run.train(6, fail="backward") is False
    assert run.results() == [("saved", 3), ("skipped", 5)]
    assert "no emergency snapshot: CUDA error: device-side assert triggered" in run.events[-1].message


@pytest.mark.parametrize("fail", ["forward", "backward"])
def test_a_run_that_failed_within_a_step_goes_on_bitwise_after_the_step_before(tmp_path: Path, fail: str) -> None:
    unbroken = Run(tmp_path / "unbroken")
    unbroken.train(10)
    broken = Run(tmp_path / "broken")
    assert broken.train(6, fail=fail) is True
    assert broken.results() == [("saved", 3), ("saved", 5)]
    assert "emergency snapshot of step 5 saved" in broken.events[-1].message
    resumed = Run(tmp_path / "broken", attempt=1, seed=9)
    assert resumed.snapshots.last_saved is not None
    assert (resumed.snapshots.last_saved.kind, resumed.cursor.step) == ("emergency", 5)
    resumed.train(10)
    expected = unbroken.tensors()
    assert [name for name, tensor in resumed.tensors().items() if not torch.equal(tensor, expected[name])] == []
    assert resumed.scheduler.state_dict() == unbroken.scheduler.state_dict()


def test_a_step_that_has_begun_to_change_the_weights_leaves_no_snapshot(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.train(6, fail="update") is False
    assert run.results() == [("saved", 3), ("skipped", 5)]
    assert run.events[-1].message == (
        "no emergency snapshot: step 6 had begun to change the weights. The next attempt goes on from step 3"
    )
    assert Run(tmp_path, attempt=1).cursor.step == 3


def test_an_optimizer_that_raises_in_its_own_step_leaves_no_snapshot(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(5)
    run.optimizer.param_groups[0]["betas"] = "not a pair of numbers"
    with pytest.raises(ValueError, match="too many values"):
        run.train(6)
    assert run.snapshots.emergency(ValueError()) is False
    assert "had begun to change the weights" in run.events[-1].message


def test_a_change_that_no_optimizer_makes_is_announced_by_begin_update(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(5)
    run.snapshots.begin_update()
    assert run.snapshots.emergency(Broken()) is False


def test_weights_that_a_validation_has_put_in_place_of_others_leave_no_snapshot(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(4)
    own = [parameter.detach().clone() for parameter in run.model.parameters()]
    for parameter in run.model.parameters():
        parameter.data.mul_(0.5)
    progress = Progress(4, 0, 64)
    assert not run.snapshots.emergency(Broken())
    assert not run.snapshots.save(progress, kind="preempted", wait=True)
    assert all("the weights are not those of step 4" in event.message for event in run.events[-2:])
    for parameter, value in zip(run.model.parameters(), own, strict=True):
        parameter.data.copy_(value)
    assert run.snapshots.save(progress, kind="preempted", wait=True)


class WithMomentumEncoder(torch.nn.Module):
    """As of MoCo: its forward pass moves the key encoder, which no optimizer trains, towards the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.key.weight.lerp_(self.query.weight, 0.5)
        return self.query(inputs) - self.key(inputs)


@pytest.mark.parametrize("moves", [True, False])
def test_parameters_that_a_forward_pass_has_changed_leave_no_snapshot(tmp_path: Path, moves: bool) -> None:
    model = WithMomentumEncoder()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    run = Run(tmp_path, states={"model": model, "optimizer": optimizer})
    for number in range(1, 5):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.snapshots.step_end(Progress(number, 0, 16 * number))
    if moves:
        model(torch.randn(16, 8))
    assert not run.snapshots.has_other_weights(4)
    assert run.snapshots.emergency(Broken()) is not moves
    run.snapshots.close()
    said = "parameters that no optimizer of the run's trains are not those of step 4: something has changed them"
    assert (said in run.events[-1].message) is moves


@pytest.mark.parametrize("is_freed", [False, True])
def test_frozen_parameters_that_are_offloaded_between_steps_are_still_those_of_the_step(
    tmp_path: Path, is_freed: bool
) -> None:
    """Such as those of a text encoder, whose memory on the device is needed for something else meanwhile."""
    model = WithMomentumEncoder()
    weight, values = model.key.weight, model.key.weight.detach().clone()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    run = Run(tmp_path, states={"model": model, "optimizer": optimizer})
    for number in range(1, 5):
        model.query(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weight.data = torch.empty(0) if is_freed and number % 3 else values.clone()
        run.snapshots.step_end(Progress(number, 0, 16 * number))
    weight.data = values.clone()
    assert run.snapshots.emergency(Broken()) is not is_freed
    run.snapshots.close()


def test_a_failure_before_any_step_leaves_nothing_and_says_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.train(1, fail="forward") is False
    assert run.events == []


def test_a_failure_right_after_a_save_needs_no_other_snapshot(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.train(4, fail="forward") is True
    assert run.results() == [("saved", 3)]


def test_a_fenced_run_leaves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(5)
    assert run.snapshots.emergency(FencedError("a newer attempt")) is False
    Fence.acquire(tmp_path, created=1, attempt=1, uid="uid-1")
    assert run.snapshots.emergency(Broken()) is False
    assert not (tmp_path / "step-000000000005").exists()
    assert "is fenced: attempt 1" in run.events[-1].message


def test_a_volume_that_fails_too_hides_no_error(tmp_path: Path) -> None:
    class FullDisk(Disk):
        def create(self, path: Path, chunks: Any) -> NoReturn:
            raise OSError(5, os.strerror(5))

    run = Run(tmp_path)
    run.train(5)
    assert run.snapshots._saver is not None
    run.snapshots._saver._store.disk = FullDisk()
    assert run.snapshots.emergency(Broken()) is False
    assert run.results() == [("saved", 3), ("failed", 5)]


def test_a_buffer_that_was_replaced_or_is_not_saved_does_no_harm(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.model.register_buffer("scratch", torch.zeros(3), persistent=False)
    norm = run.model[2]
    run.train(4)
    at_boundary = norm.running_mean.clone()
    norm.running_mean = norm.running_mean + 1
    assert run.snapshots.emergency(Broken()) is True
    assert torch.equal(Run(tmp_path, attempt=1, seed=3).model[2].running_mean, at_boundary)


def replace_a_module(model: torch.nn.Module) -> None:
    model.set_submodule("2", torch.nn.BatchNorm1d(8))


def add_a_buffer(model: torch.nn.Module) -> None:
    model.get_submodule("0").register_buffer("mean", torch.zeros(8))


@pytest.mark.parametrize("change", [replace_a_module, add_a_buffer])
def test_modules_that_were_replaced_or_buffers_added_leave_no_snapshot(
    tmp_path: Path, change: Callable[[torch.nn.Module], None]
) -> None:
    """The end of a step has kept the buffers of those that there were, which would be saved under the same names."""
    run = Run(tmp_path)
    run.train(2)
    change(run.model)
    assert run.train(6, fail="backward") is False
    assert run.results() == [("saved", 3), ("skipped", 5)]
    assert "a module of model was replaced, or a buffer added, since attach(): change" in run.events[-1].message


class HeadOnly(torch.nn.Sequential):
    """Its state is that of its second part, under the names that the first part has in the whole."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"0.{name}": value for name, value in self[1].state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any], *_: Any) -> Any:  # type: ignore[override]
        return self[1].load_state_dict({name.removeprefix("0."): value for name, value in state.items()})


def test_buffers_are_found_by_the_names_that_they_have_in_the_state(tmp_path: Path) -> None:
    def states() -> dict[str, Any]:
        norms = [torch.nn.BatchNorm1d(2) for _ in range(3)]
        return {"wrapped": torch.nn.Sequential(checkpoint_wrapper(norms[0])), "head": HeadOnly(*norms[1:])}

    def buffers(states: dict[str, Any]) -> list[torch.Tensor]:
        return [buffer for part in (states["wrapped"], states["head"][1]) for buffer in part.buffers()]

    before, after = states(), states()
    run = Run(tmp_path, states=before)
    before["head"][0].running_mean.fill_(5)
    run.train(4)
    at_boundary = [buffer.clone() for buffer in buffers(before)]
    for buffer in buffers(before):
        buffer.add_(1)
    assert run.snapshots.emergency(Broken()) is True
    Run(tmp_path, attempt=1, states=after)
    assert [buffer.tolist() for buffer in buffers(after)] == [buffer.tolist() for buffer in at_boundary]


def copying(module: torch.nn.Module) -> torch.nn.Module:
    """Its state has copies, as that of a program that moves it to the CPU."""
    wrapped: torch.nn.Module = torch.nn.Sequential(checkpoint_wrapper(module))
    wrapped.register_state_dict_post_hook(
        lambda _, state, *__: state.update({key: value.clone() for key, value in state.items()})
    )
    return wrapped


class Observer(torch.nn.Module):
    """Knows no value before its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor([]))
        self.register_buffer("most", torch.tensor([]))


def test_buffers_without_a_value_yet_are_not_taken_for_one_another(tmp_path: Path) -> None:
    observer = Observer()
    run = Run(tmp_path, states={"observer": torch.nn.Sequential(checkpoint_wrapper(observer))})
    observer.least, observer.most = torch.tensor([1.0]), torch.tensor([2.0])
    run.train(4)
    assert run.snapshots.emergency(Broken()) is True
    after = Observer()
    after.least, after.most = torch.zeros(1), torch.zeros(1)
    Run(tmp_path, attempt=1, states={"observer": torch.nn.Sequential(checkpoint_wrapper(after))})
    assert (after.least.item(), after.most.item()) == (1.0, 2.0)


class WithExtraState(torch.nn.Linear):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None: ...


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"changes_with_optimizer": ()}, r"cursor may have changed since; name it in changes_with_optimizer=…"),
        ({"states": {"extra": WithExtraState(1, 1)}}, "extra has state of its own"),
        ({"states": {"extra": copying(torch.nn.BatchNorm1d(2))}}, r"extra copies its buffers in its state_dict\(\)"),
    ],
)
def test_where_more_may_have_changed_there_is_no_snapshot_and_a_reason(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    run = Run(tmp_path, **settings)
    assert run.train(5, fail="forward") is False
    assert run.results() == [("saved", 3), ("skipped", 3)]
    assert re.search(named, run.events[-1].message)


def test_buffers_too_large_to_copy_in_every_step_are_a_reason_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "MAX_BUFFER_BYTES", 8)
    run = Run(tmp_path)
    assert run.train(5, fail="forward") is False
    assert "model has more than 0 MiB of buffers" in run.events[-1].message


def test_buffers_that_are_not_saved_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "MAX_BUFFER_BYTES", 100)
    extra = torch.nn.Linear(1, 1)
    extra.register_buffer("mask", torch.zeros(100), persistent=False)
    extra.register_buffer("edges", torch.eye(2).to_sparse(), persistent=False)
    assert Run(tmp_path, states={"extra": extra}).train(5, fail="forward") is True
