"""Accelerate: `save_state` and `load_state` on verified checkpoints.

run = ddp_trainer.attach()
for step in range(load_state(run, accelerator), steps):
    ...
    run.step_end(loss)
    if run.should_save() or run.step == steps:
        save_state(run, accelerator)
    if run.should_stop():
        break
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_trainer.client.run import Run

if TYPE_CHECKING:
    from accelerate import Accelerator


def load_state(run: Run, accelerator: Accelerator) -> int:
    """Load the newest checkpoint that verifies, if there is one; how many steps are finished. Instead of `run.resume`.

    Accelerate restores what it has prepared, and the random numbers where the number of ranks is the same.
    """
    step = run.resume()
    folder = run.latest()
    if folder is not None:
        accelerator.load_state(str(folder))
    return step


def save_state(run: Run, accelerator: Accelerator, step: int | None = None) -> None:
    """Save all that accelerate has prepared as the checkpoint of `step`, the last one unless it is given."""
    project = accelerator.project_configuration
    names_folders = project.automatic_checkpoint_naming
    with run.checkpoint(step) as folder:
        # else accelerate saves into a folder of the project, whatever it is given
        project.automatic_checkpoint_naming = False
        try:
            accelerator.save_state(str(folder))
        finally:
            project.automatic_checkpoint_naming = names_folders
