"""A script with Lightning's Trainer, as it stands in a tutorial, and the callback."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from ddp_trainer.integrations.lightning import DDPJobCallback

arguments = argparse.ArgumentParser()
arguments.add_argument("--sigterm-at", type=int, default=0)
arguments.add_argument("--model-checkpoint", action="store_true")
arguments.add_argument("--again", choices=["same"], help="train another model, with this callback")
arguments.add_argument("--save-epochs", action="store_true", help="a ModelCheckpoint at the end of each epoch")
arguments.add_argument("--random", action="store_true", help="shuffle, and drop out, on each rank otherwise")
arguments.add_argument("--validates-every", type=int, default=0, help="so many steps, and lower the rate by it")
arguments = arguments.parse_args()
shared = Path(os.environ["DDPJOB_SHARED"])


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.dropout = torch.nn.Dropout(0.5 if arguments.random else 0.0)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if (
            self.global_rank == self.trainer.world_size - 1
            and os.environ["DDPJOB_ATTEMPT"] == "0"
            and self.global_step + 1 == arguments.sigterm_at
        ):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(float(os.environ.get("PACE", "0")))
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(self.dropout(inputs)), targets)
        if self.global_rank == 0:
            with (shared / "losses.jsonl").open("a") as file:
                file.write(json.dumps([self.global_step + 1, loss.item()]) + "\n")
        return loss

    def on_train_epoch_start(self) -> None:
        with (shared / "rates").open("a") as file:
            file.write(f"{self.current_epoch} {self.trainer.optimizers[0].param_groups[0]['lr']}\n")

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("measured", 1.0)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            with (shared / "validated").open("a") as file:
                file.write(f"{self.global_step}\n")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        if not arguments.validates_every:
            return optimizer
        lowered = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lowered, "monitor": "measured"}}


torch.manual_seed(1)
inputs = torch.rand(64, 4)
if arguments.random:
    torch.manual_seed(int(os.environ["RANK"]))
loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8, shuffle=arguments.random)
callback = DDPJobCallback()
own = [ModelCheckpoint(shared / "own", every_n_train_steps=3, save_top_k=-1)] if arguments.model_checkpoint else []
own += [ModelCheckpoint(shared / "own", every_n_epochs=1, save_top_k=-1)] if arguments.save_epochs else []


def train(model: Regression) -> lightning.Trainer:
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="auto" if arguments.random else "ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=6,
        logger=False,
        enable_checkpointing=bool(own),
        enable_progress_bar=False,
        val_check_interval=arguments.validates_every or None,
        callbacks=[callback, *own],
        plugins=[callback.checkpoint_io],
    )
    validation = loader if arguments.validates_every else None
    trainer.fit(model, loader, validation, ckpt_path=callback.latest())
    return trainer


model = Regression()
trainer = train(model)
if arguments.again:
    train(Regression())
if trainer.is_global_zero:
    (shared / "weights.json").write_text(json.dumps(model.layer.weight.tolist()))
    (shared / "finished").write_text(str(trainer.global_step))
