"""States back into the objects that they came from, where what these do by themselves is not enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_trainer.snapshots.codec.state import Stateful


def load_into(value: Stateful, state: Any, *, keep_types: bool = True) -> None:
    """Have `value` take over `state`, which its `state_dict` returned and a snapshot or another rank has held. Without
    `keep_types` an optimizer converts it to the types of its parameters.
    """
    with loading(value, keep_types=keep_types) if isinstance(value, Optimizer) else nullcontext():
        value.load_state_dict(state)


@contextmanager
def loading(optimizer: Optimizer, *, keep_types: bool = True) -> Iterator[None]:
    """Around what has `optimizer` load its state.

    With `keep_types`, for weights of the types that were saved, its tensors have theirs as well: torch converts all but
    `step` to the type of the parameter, and so rounds what an optimizer keeps in float32 beside weights in bfloat16.

    Afterwards they lie in memory as their parameters do: a file has them in the order of their indices, an optimizer
    keeps the tensors that it is given, and a fused one goes through the memory of a parameter and its moments from one
    end to the other. With a model in channels_last each moment would be another weight's.

    Tensors of its groups come back to their device, where torch leaves them as they were read. A captured CUDA graph
    reads a learning rate there at each replay; one of the CPU would be for ever what it was at the capture.
    """
    devices = [
        {key: value.device for key, value in group.items() if isinstance(value, Tensor)}
        for group in optimizer.param_groups
    ]
    saved: dict[str, Any] = {}

    def loaded(optimizer: Optimizer) -> None:
        numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in saved["state"]:
                optimizer.state[parameter] = _as_saved(optimizer.state[parameter], saved["state"][number])

    # hooks see the state as torch converts it, also where a class of its own changes it before or afterwards
    hooks = []
    if keep_types and hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):  # some wrappers have no such hooks
        hooks.append(optimizer.register_load_state_dict_pre_hook(lambda _, state: saved.update(state)))
        hooks.append(optimizer.register_load_state_dict_post_hook(loaded))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for group, known in zip(optimizer.param_groups, devices, strict=False):
        for key, device in known.items():
            if isinstance(group.get(key), Tensor):
                group[key] = group[key].to(device)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state: Any = optimizer.state.get(parameter)
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and value.shape == parameter.shape and _lies_otherwise(value, parameter):
                    state[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _as_saved(loaded: Any, saved: Any) -> Any:
    """`loaded` with the tensors of `saved` where their type is another, on the device of the loaded ones."""
    match loaded, saved:
        case Tensor(), Tensor() if loaded.dtype != saved.dtype:
            return saved.to(loaded.device)
        case dict(), dict():
            # torch leaves the type of `step` alone, but for a fused optimizer, which needs float32
            kept = loaded.keys() - saved.keys() | {"step"}
            return {key: value if key in kept else _as_saved(value, saved[key]) for key, value in loaded.items()}
        case (list() | tuple(), list() | tuple()) if len(loaded) == len(saved):
            return type(loaded)(_as_saved(*both) for both in zip(loaded, saved, strict=True))
    return loaded


def _lies_otherwise(value: Tensor, parameter: Tensor) -> bool:
    own, its = _on_this_rank(value), _on_this_rank(parameter)
    return own.layout == its.layout == torch.strided and own.shape == its.shape and own.stride() != its.stride()


def _on_this_rank(tensor: Tensor) -> Tensor:
    """Of a DTensor its part, which is a plain tensor in memory."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
