"""What Hugging Face's Trainer adds to what torch's hooks see: a real Trainer with a small model."""

from __future__ import annotations

from pathlib import Path

import torch

from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from ddp_trainer.rank.observe import close_observer, observe


class Batches(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((8,), index % 5), "labels": torch.tensor(index % 2)}


def test_a_trainer_reports_steps_total_epoch_samples_its_own_loss_and_metrics(tmp_path: Path) -> None:
    import transformers  # takes seconds

    heartbeat_dir(tmp_path).mkdir()
    observer = observe(Heartbeat(heartbeat_dir(tmp_path), observed=True), world_size=1)
    try:
        settings = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        trainer = transformers.Trainer(
            model=transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=8, **settings)),
            args=transformers.TrainingArguments(
                str(tmp_path / "out"),
                num_train_epochs=2,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                eval_strategy="epoch",
                save_strategy="no",
                logging_steps=1,
                report_to=[],
                use_cpu=True,
            ),
            train_dataset=Batches(),
            eval_dataset=Batches(),
        )
        trainer.train()
        observer.done()
    finally:
        close_observer()
    (beat,) = read_heartbeats(tmp_path)
    assert (beat["phase"], beat["step"], beat["totalSteps"], beat["epoch"]) == ("done", 8, 8, 2)
    assert beat["samples"] == 64
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert beat["loss"] in logged
    assert 0 < beat["metrics"]["eval_loss"] < 5
