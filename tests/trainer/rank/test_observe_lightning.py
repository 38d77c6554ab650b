"""What Lightning's Trainer adds to what torch's hooks see: a real Trainer with a small model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ddp_trainer.contract.exit_codes import LossNotFinite
from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from ddp_trainer.rank.observe import close_observer, observe


class Unsized(IterableDataset[Any]):
    """Four batches of no known length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(4), torch.ones(1))] * 32)


def fit(
    directory: Path,
    dataset: Any = None,
    resume: Path | None = None,
    policy: str = "Warn",
    tune: int = 0,
    optimizers: Sequence[type[torch.optim.Optimizer]] = (torch.optim.SGD,),
    accumulated: int = 1,
    **settings: Any,
) -> tuple[dict[str, Any], list[str]]:
    """Train as a tutorial does, observed, after `tune` steps that look for a learning rate; the last heartbeat, and the
    phases that were entered. Several optimizers, as those of a GAN, each make one in every batch of so many.
    """
    heartbeat_dir(directory).mkdir(parents=True)
    heartbeat = Heartbeat(heartbeat_dir(directory), observed=True)
    phases: list[str] = []
    enter = heartbeat.enter
    heartbeat.enter = lambda phase: (phases.append(phase), enter(phase))  # type: ignore[assignment,func-returns-value]
    observer = observe(heartbeat, world_size=1, non_finite_loss=policy)
    try:
        import lightning  # takes seconds

        class Regression(lightning.LightningModule):  # type: ignore[misc,name-defined,unused-ignore]
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.lr = torch.nn.Linear(4, 1), 0.1
                self.automatic_optimization = len(optimizers) == 1

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
                for optimizer in () if self.automatic_optimization else self.optimizers():
                    self.manual_backward(loss)
                    if (index + 1) % accumulated == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
                return loss

            def validation_step(self, batch: Any, index: int) -> None:
                self.log("val_loss", torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1]))

            def configure_optimizers(self) -> list[torch.optim.Optimizer]:
                return [kind(self.parameters(), lr=self.lr) for kind in optimizers]  # type: ignore[call-arg]

        inputs = torch.rand(32, 4)
        loader = DataLoader(dataset or TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(accelerator="cpu", enable_model_summary=False, **quiet, **settings)
        model = Regression()
        if tune:
            from lightning.pytorch.tuner import Tuner

            Tuner(trainer).lr_find(model, loader, num_training=tune)
        trainer.fit(model, loader, loader, ckpt_path=resume)
        trainer.save_checkpoint(directory / "last.ckpt")
        observer.done()
    finally:
        close_observer()
    (beat,) = read_heartbeats(directory)
    return beat, phases


def test_a_trainer_reports_steps_total_epoch_samples_validation_and_metrics(tmp_path: Path) -> None:
    beat, phases = fit(tmp_path, max_epochs=3)
    assert (beat["phase"], beat["step"], beat["totalSteps"], beat["epoch"]) == ("done", 12, 12, 3)
    assert (beat["samples"], beat["learningRate"]) == (96, 0.1)
    assert 0 < beat["metrics"]["val_loss"] < 5
    assert phases.count("validate") == 3, "once an epoch, and not for the sanity check before training"


@pytest.mark.parametrize(("accumulated", "total"), [(1, 16), (2, 12)], ids=["as many steps", "half as many"])
def test_the_total_of_a_trainer_that_resumes_counts_the_steps_that_its_epochs_have_now(
    tmp_path: Path, accumulated: int, total: int
) -> None:
    """As with another number of ranks: two epochs of four steps, and two more."""
    fit(tmp_path / "before", max_epochs=2)
    checkpoint = tmp_path / "before" / "last.ckpt"
    beat, _ = fit(tmp_path / "after", resume=checkpoint, max_epochs=4, accumulate_grad_batches=accumulated)
    assert (beat["step"], beat["totalSteps"], beat["epoch"]) == (total, total, 4)


@pytest.mark.parametrize(
    ("kind", "accumulated"),
    [(torch.optim.Adam, 1), (torch.optim.Adam, 2), (torch.optim.SGD, 1)],
    ids=["it counts", "it counts, and accumulates", "it does not count"],
)
def test_a_trainer_with_several_optimizers_resumes_after_the_steps_of_one(
    tmp_path: Path, kind: Any, accumulated: int
) -> None:
    settings: dict[str, Any] = {"optimizers": (kind, kind), "accumulated": accumulated}
    first, _ = fit(tmp_path / "before", max_epochs=2, **settings)
    checkpoint = tmp_path / "before" / "last.ckpt"
    beat, _ = fit(tmp_path / "after", resume=checkpoint, max_epochs=4, **settings)
    steps = 8 // accumulated
    assert (first["step"], beat["resumedFromStep"], beat["step"]) == (steps, steps, 2 * steps)
    assert beat["counters"]["steps"] == steps
    assert accumulated > 1 or (first["totalSteps"], beat["totalSteps"]) == (8, 16)


def test_a_bound_of_the_steps_of_all_optimizers_is_no_total(tmp_path: Path) -> None:
    beat, _ = fit(tmp_path, optimizers=(torch.optim.SGD, torch.optim.SGD), max_steps=6)
    assert (beat["step"], beat["totalSteps"]) == (3, None)


def test_a_trainer_without_an_end_has_no_total(tmp_path: Path) -> None:
    from datetime import timedelta

    beat, _ = fit(tmp_path, max_epochs=-1, max_time=timedelta(seconds=1))
    assert beat["totalSteps"] is None
    assert beat["step"] > 0


def test_data_without_a_length_has_no_total(tmp_path: Path) -> None:
    beat, _ = fit(tmp_path, Unsized(), max_epochs=1)
    assert (beat["step"], beat["totalSteps"]) == (4, None)


def test_the_steps_of_a_search_for_the_learning_rate_are_not_those_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the search saves what it goes back to
    beat, _ = fit(tmp_path, tune=8, max_epochs=3)
    assert (beat["phase"], beat["step"], beat["totalSteps"], beat["counters"]["steps"]) == ("done", 12, 12, 20)


@pytest.mark.parametrize("policy", ["Stop", "Rollback"])
def test_a_loss_that_is_not_finite_ends_a_trainer(tmp_path: Path, policy: str) -> None:
    with pytest.raises(LossNotFinite, match="the loss of step 1, or of one shortly before, is nan"):
        fit(tmp_path, TensorDataset(torch.full((32, 4), torch.nan), torch.ones(32, 1)), policy=policy, max_epochs=1)


def test_the_callback_is_gone_once_the_script_is_no_longer_observed(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    import lightning

    names = [type(callback).__qualname__ for callback in lightning.Trainer(accelerator="cpu").callbacks]
    assert not any("Report" in name for name in names)


def test_a_trainer_that_is_observed_can_be_pickled_and_copied(tmp_path: Path) -> None:
    """As with strategy="ddp_spawn", in whose processes nothing observes."""
    observe(Heartbeat(tmp_path, observed=True), world_size=1)
    try:
        import lightning

        trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        (ours,) = [each for each in trainer.callbacks if type(each).__name__ == "Report"]
        assert type(pickle.loads(pickle.dumps(ours))) is lightning.Callback
        assert len(pickle.loads(pickle.dumps(trainer)).callbacks) == len(trainer.callbacks)
        assert ours in copy.deepcopy(trainer).callbacks, "a copy in this process reports too"
        assert ours in copy.copy(trainer).callbacks
    finally:
        close_observer()


@pytest.mark.parametrize("main", [True, False], ids=["with a tracker", "without"])
def test_what_a_script_logs_with_accelerate_is_reported(tmp_path: Path, main: bool) -> None:
    heartbeat_dir(tmp_path).mkdir()
    observer = observe(Heartbeat(heartbeat_dir(tmp_path), observed=True), world_size=1)
    try:
        from accelerate import Accelerator  # takes seconds
        from accelerate.tracking import GeneralTracker

        logged: list[Any] = []

        class Tracker(GeneralTracker):  # type: ignore[misc,unused-ignore]
            name = "ours"
            requires_logging_directory = False

            @property
            def tracker(self) -> Any:
                return logged

            def store_init_configuration(self, values: Any) -> None: ...

            def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
                logged.append(values)

        accelerator = Accelerator(cpu=True, log_with=Tracker() if main else None)
        accelerator.init_trackers("test")
        model = torch.nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"epoch": 1, "accuracy": torch.tensor(0.5), "note": "text"}, step=step)
            accelerator.log({1: 0.5, "odd": torch.ones(1, device="meta")}, step=step)
        observer.done()
    finally:
        close_observer()
    (beat,) = read_heartbeats(tmp_path)
    assert (beat["phase"], beat["step"], beat["epoch"], beat["metrics"]) == ("done", 3, 1, {"accuracy": 0.5})
    assert len(logged) == (6 if main else 0), "the script's own trackers get everything"
