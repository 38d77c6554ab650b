"""What Hugging Face's Trainer adds to what torch's hooks see: a real Trainer with a small model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch

from ddp_trainer.contract.exit_codes import LossNotFinite
from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from ddp_trainer.rank.observe import close_observer, observe


class Batches(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((8,), index % 5), "labels": torch.tensor(index % 2)}


def trained(
    tmp_path: Path,
    world_size: int,
    logs: dict[str, Any] | None = None,
    *,
    policy: str = "Warn",
    nan_from: int | None = None,
    left_out: tuple[int, ...] = (),
    **arguments: Any,
) -> Any:
    """A Trainer that has trained, observed as one of so many ranks; with `logs` among what it logs at each step, with
    losses that are NaN from some step on, and with steps that leave out the optimizer's, as with a GradScaler.
    """
    import transformers  # takes seconds

    class Trainer(transformers.Trainer):  # type: ignore[misc,unused-ignore]
        def log(self, values: dict[str, float], *others: Any) -> None:
            super().log(values | (logs or {}), *others)

        def create_optimizer(self, *values: Any) -> torch.optim.Optimizer:
            made: torch.optim.Optimizer = super().create_optimizer(*values)

            def step(optimizer: torch.optim.Optimizer, *closure: Any) -> None:
                if self.state.global_step + 1 not in left_out:
                    type(optimizer).step(optimizer, *closure)

            made.step = MethodType(step, made)  # type: ignore[method-assign]
            return made

        def compute_loss(self, *values: Any, **named: Any) -> Any:
            loss = super().compute_loss(*values, **named)
            return loss * torch.nan if nan_from is not None and self.state.global_step + 1 >= nan_from else loss

    heartbeat_dir(tmp_path).mkdir()
    heartbeat = Heartbeat(heartbeat_dir(tmp_path), observed=True)
    observer = observe(heartbeat, world_size=world_size, non_finite_loss=policy)
    try:
        settings = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        trainer = Trainer(
            model=transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=8, **settings)),
            args=transformers.TrainingArguments(
                str(tmp_path / "out"),
                per_device_train_batch_size=4,
                save_strategy="no",
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                **arguments,
            ),
            train_dataset=Batches(),
            eval_dataset=Batches(),
        )
        trainer.train()
        observer.done()
    finally:
        close_observer()
    return trainer


def test_a_trainer_reports_steps_total_epoch_samples_its_own_loss_and_metrics(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = trained(tmp_path, world_size=1, num_train_epochs=2, gradient_accumulation_steps=2, eval_strategy="epoch")
    (beat,) = read_heartbeats(tmp_path)
    assert (beat["phase"], beat["step"], beat["totalSteps"], beat["epoch"]) == ("done", 8, 8, 2)
    assert beat["samples"] == 64
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert beat["loss"] in logged
    assert 0 < beat["metrics"]["eval_loss"] < 5
    assert "for itself" not in capfd.readouterr().err


def test_a_step_counts_as_it_does_for_the_trainer_where_that_of_the_optimizer_is_left_out(tmp_path: Path) -> None:
    trained(tmp_path, world_size=1, max_steps=8, left_out=(1, 2, 5))
    (beat,) = read_heartbeats(tmp_path)
    assert (beat["step"], beat["totalSteps"], beat["samples"]) == (8, 8, 32)


def test_a_trainer_that_knows_of_no_other_rank_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, world_size=2, max_steps=2)
    assert "the Trainer counts 1 of the 2 ranks" in capfd.readouterr().err


@pytest.mark.parametrize("loss", [{"text": 0.5, "image": 0.7}, "0.5", [0.5, 0.7]], ids=["parts", "text", "list"])
def test_what_a_trainer_logs_as_its_loss_and_is_no_number_ends_no_script(tmp_path: Path, loss: object) -> None:
    trained(tmp_path, world_size=1, max_steps=2, logs={"loss": loss})
    (beat,) = read_heartbeats(tmp_path)
    assert (beat["phase"], beat["step"]) == ("done", 2)


@pytest.mark.parametrize("is_left_out", [True, False], ids=["left out of its mean", "logged"])
def test_a_loss_that_is_not_finite_ends_a_trainer_whatever_it_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_left_out: bool
) -> None:
    monkeypatch.setattr("ddp_trainer.contract.heartbeat.WRITE_INTERVAL_SECONDS", 0.0)
    with pytest.raises(LossNotFinite, match="the loss of step 3, or of one shortly before, is nan"):
        trained(tmp_path, 1, policy="Stop", nan_from=3, max_steps=8, logging_nan_inf_filter=is_left_out)
    (beat,) = read_heartbeats(tmp_path)
    assert beat["loss"] > 0, "the one that the Trainer has logged"
    assert beat["nonFiniteLoss"] == {"step": 3, "steps": 1}


def test_the_callback_of_a_trainer_can_be_pickled_and_copied(tmp_path: Path) -> None:
    """As Ray does with a Trainer, in whose processes nothing observes."""
    observe(Heartbeat(tmp_path, observed=True), world_size=1)
    try:
        import transformers.trainer as library

        ours = library.DEFAULT_CALLBACKS[-1]()
        assert type(ours) is not library.TrainerCallback
        assert type(pickle.loads(pickle.dumps(ours))) is library.TrainerCallback
        assert copy.deepcopy(ours) is ours, "a copy in this process reports too"
    finally:
        close_observer()
