"""A script with Hugging Face's Trainer, as it stands in a tutorial, and the callback."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from ddp_trainer.integrations.transformers import DDPJobCallback

arguments = argparse.ArgumentParser()
arguments.add_argument("--sigterm-at", type=int, default=0)
arguments.add_argument("--sigkill-at", type=int, default=0)
arguments.add_argument("--save-epochs", action="store_true")
arguments.add_argument("--out-of-memory-at", type=int, default=0, help="once, and look for a batch that fits")
arguments.add_argument("--adds-files", action="store_true", help="a callback adds a file to what the Trainer saves")
arguments.add_argument("--again", choices=["same", "new"], help="train once more, with this callback")
arguments = arguments.parse_args()
shared = Path(os.environ["DDPJOB_SHARED"])
attempt = os.environ["DDPJOB_ATTEMPT"]


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": (torch.arange(8) * (index + 1)) % 16, "labels": torch.tensor(index % 2)}


class Notes(TrainerCallback):
    """Notes each loss, and strikes rank 1."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            with (shared / "losses.jsonl").open("a") as file:
                file.write(json.dumps([state.global_step, logs["loss"], logs["grad_norm"]]) + "\n")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if arguments.adds_files and state.is_world_process_zero:
            (shared / "output" / f"checkpoint-{state.global_step}" / "added").write_text(str(state.global_step))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(float(os.environ.get("PACE", "0")))
        if state.global_step + 1 == arguments.out_of_memory_at:
            arguments.out_of_memory_at = 0
            raise RuntimeError("CUDA out of memory.")
        if args.process_index == 1 and attempt == "0":
            if state.global_step + 1 == arguments.sigterm_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if state.global_step + 1 == arguments.sigkill_at:
                os.kill(os.getpid(), signal.SIGKILL)


settings = TrainingArguments(
    output_dir=str(shared / "output"),
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=int(os.environ.get("ACCUMULATED", "1")),
    logging_steps=1,
    save_strategy="epoch" if arguments.save_epochs else "no",
    auto_find_batch_size=bool(arguments.out_of_memory_at),
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    seed=1,
)
torch.manual_seed(1)
sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
callback = DDPJobCallback()


def train() -> Trainer:
    trainer = Trainer(
        model=BertForSequenceClassification(BertConfig(vocab_size=16, **sizes)),
        args=settings,
        train_dataset=Sentences(),
        callbacks=[callback, Notes()],
    )
    trainer.train(resume_from_checkpoint=callback.latest())
    return trainer


trainer = train()
if arguments.again:
    callback = callback if arguments.again == "same" else DDPJobCallback()
    train()
trainer.save_model(str(shared / "final"))
