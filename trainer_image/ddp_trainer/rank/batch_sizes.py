"""How many samples a batch of a DataLoader has: a batch may be of any kind, and none of them says so.

    samples = batch_size(batch, samples_asked_for(iterator))

Mostly it is the length of the first tensor. Where the DataLoader says how many samples it has put into the batch, that
is compared with what the batch has. This comes in each step, on objects of the script: it asks nothing of a device, and
fails on none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any


def samples_asked_for(iterator: Any) -> int | None:
    """How many samples the iterator of a DataLoader puts into a batch; None where it makes none, or does not say so. A
    batch sampler may be in another one, as in the loader of Ultralytics, which begins it again and again.
    """
    try:
        if not iterator._auto_collation:
            return None
        sampler = iterator._index_sampler
        size = getattr(sampler, "batch_size", None)
        if size is None:
            size = getattr(getattr(sampler, "sampler", None), "batch_size", None)
    except Exception:  # what torch has inside may change, and a sampler of the script may be of any kind
        return None
    return size if isinstance(size, int) else None


def batch_size(batch: object, asked_for: int | None = None) -> int | None:
    """Length of the first dimension of the first tensor in a batch; None where there is none.

    Pictures of several sizes come as a list of tensors, each of three colours, and the boxes in all of them as one
    tensor. So where that length is not the number of samples `asked_for`, and a part of the batch has this many, it is
    that number.
    """
    first = _first_length(batch)
    if asked_for is None or first is None or first == asked_for:
        return first
    try:
        return asked_for if _has_length(batch, asked_for) else first
    except Exception:  # as below
        return first


def _first_length(batch: object, depth: int = 3) -> int | None:
    try:
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return index(shape[0]) if len(shape) else None
        if depth:
            if type(batch) is list or type(batch) is tuple:  # as most are, and cheap to tell
                values: Iterable[object] = batch
            else:
                values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else ()
            for value in values if not isinstance(values, str | bytes) else ():
                if (size := _first_length(value, depth - 1)) is not None:
                    return size
    except Exception:  # a nested tensor has no shape, and another object's may be of any kind
        return None
    return None


def _has_length(batch: object, length: int) -> bool:
    """Whether a part of a batch is a tensor or a list of this length. The batch itself may be of inputs and targets;
    where it is of dicts, each is one sample. What has one element may be anything, such as a weight beside a batch that
    the dataset has made itself, so a batch of one sample has no longer part.
    """
    if isinstance(batch, list | tuple) and len(batch) == length and all(isinstance(part, Mapping) for part in batch):
        return True
    parts: Iterable[object] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    lengths = {_length(part) for part in parts}
    return length in lengths and (length > 1 or lengths <= {1, None})


def _length(part: object) -> int | None:
    try:
        shape = getattr(part, "shape", None)
        if shape is not None:
            return index(shape[0]) if len(shape) else None
        return len(part) if isinstance(part, list | tuple) else None
    except Exception:  # as above
        return None
