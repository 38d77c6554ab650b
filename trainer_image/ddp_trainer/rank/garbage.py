"""Keeps Python's garbage collector out of the import of torch.

`import torch`, and `import torch._dynamo`, which every optimizer does, make 280,000 objects that stay. The collector
goes through all of them again and again while there are ever more, which takes a tenth of the time of a start.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from ddp_trainer.rank.after_import import while_importing

TORCH = "torch"
COMPILER = "torch._dynamo"


def import_torch_without_collections() -> None:
    """From now on, when the script or a library imports it."""
    for module in (TORCH, COMPILER):
        while_importing(module, _without_collections)


@contextmanager
def _without_collections() -> Iterator[None]:
    if not gc.isenabled():  # by the script
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    if not gc.get_freeze_count():
        # Into the oldest generation: the next collection of the youngest need not go through what has been imported.
        # It does not stay frozen: by the time of the compiler there may be a model, which only the collector can free.
        gc.freeze()
        gc.unfreeze()
