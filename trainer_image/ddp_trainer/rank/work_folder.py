"""The working directory of a script, and the folders of the volume that scripts expect.

The working directory of a pod is its image's. That of the trainer image is /tmp, which ends with the pod: a script that
saves a relative `snapshot.pt` there would start over after each failure. It works in `work/<job>` of the volume
instead. The directory of any other image stays, because the script may read files of the image there.

With submitted code it is always `work/<job>`, where the launcher has put the files of the code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from ddp_trainer.contract.environment import JobEnvironment

FOLDERS: Final = ("datasets", "checkpoints", "logs")


def enter_work_folder(job: JobEnvironment, scratch: Path | None) -> None:
    """Make the folders, and leave a working directory that ends with the pod. `scratch` is what does.

    A volume that cannot be written to is not an error yet: the script may not need it. With submitted code, OSError
    says that its working directory cannot be entered.
    """
    work = job.shared / "work" / job.name
    leaves = scratch is not None and Path.cwd() == scratch
    if job.code_sha256 is not None:
        os.chdir(work)
        # as `python -m` does in this directory: for modules of the code, whichever script of it is run
        sys.path.insert(0, str(Path.cwd()))
        leaves = False
    try:
        for folder in (*(job.shared / name for name in FOLDERS), *((work,) if leaves else ())):
            folder.mkdir(parents=True, exist_ok=True)
        if leaves:
            os.chdir(work)
    except OSError as error:
        lost = f"; files that the script writes to {scratch} end with the pod" if leaves else ""
        print(f"ddp_trainer: {error.filename}: {error.strerror}{lost}", file=sys.stderr, flush=True)
