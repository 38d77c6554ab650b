"""Keeps Python's garbage collector out of the import of torch, and what that leaves out of later collections.

`import torch`, and `import torch._dynamo`, which every optimizer does, make 280,000 objects that stay. The collector
goes through all of them again and again while there are ever more: a quarter of the time of a start.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from ddp_trainer.rank.after_import import while_importing

TORCH = "torch"
COMPILER = "torch._dynamo"


def import_torch_without_collections() -> None:
    """From now on, when the script or a library imports it.

    What there is once torch is imported is not looked at again (`gc.freeze`): a full collection, which holds up a step,
    then takes a third of the time. Not so after the compiler, which the first optimizer imports: by then the script has
    a model, and an Accelerate model without its references is freed by the collector alone.
    """
    while_importing(TORCH, functools.partial(_without_collections, freeze=True))
    while_importing(COMPILER, _without_collections)


@contextmanager
def _without_collections(*, freeze: bool = False) -> Iterator[None]:
    if not gc.isenabled():  # by the script
        yield
        return
    gc.disable()
    try:
        yield
        if freeze:
            gc.freeze()
    finally:
        gc.enable()
