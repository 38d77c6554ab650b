"""What a training program gives to be saved: refused where it cannot be saved rightly, and prepared where it can.

A state that is refused when it is first saved, after an hour of training, is refused an hour too late.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots.codec.state import RNG, Stateful, unwrapped
from ddp_trainer.snapshots.codec.structure import encode
from ddp_trainer.snapshots.codec.tensorfile import lay_out
from ddp_trainer.snapshots.trust.errors import SnapshotError

LOSSES = "losses"
"""The state that a run adds."""

_CHECKPOINT = (
    "save with its own writer instead: attach() without a model, and run.checkpoint() (docs: Bring your script)"
)
_REFUSED = (
    (
        "torch.distributed.fsdp",
        "FullyShardedDataParallel",
        "FullyShardedDataParallel (FSDP1) changes what its state_dict is by a mode of its own; shard the model with "
        f"torch.distributed.fsdp.fully_shard (FSDP2), or {_CHECKPOINT}",
    ),
    (
        "torch.distributed.optim",
        "ZeroRedundancyOptimizer",
        "ZeroRedundancyOptimizer has its state only after every rank has sent its part to one; shard the model with "
        f"torch.distributed.fsdp.fully_shard, or {_CHECKPOINT}",
    ),
    ("deepspeed", "DeepSpeedEngine", f"a DeepSpeed engine writes its own checkpoints; {_CHECKPOINT}"),
    (
        # its state has what the weights were quantized by, beside them, and its load_state_dict calls that unexpected
        "bitsandbytes.nn",
        "Linear4bit",
        "a layer of 4 bits of bitsandbytes, as QLoRA has them, cannot load the state that it saves; save the adapter "
        "and the optimizer with a writer of your own: attach() without a model, and run.checkpoint() (docs: Bring your "
        "script)",
    ),
    ("accelerate.utils.deepspeed", "DeepSpeedOptimizerWrapper", f"DeepSpeed writes its own checkpoints; {_CHECKPOINT}"),
)


@dataclass(frozen=True, slots=True)
class States:
    """What is saved, by name. `live` are the program's own objects, `saved` what a snapshot asks for its state.
    `sharded` names those of which each rank has a part, `per_rank` those of which each rank has its own.
    """

    live: Mapping[str, Stateful]
    saved: Mapping[str, Stateful]
    sharded: tuple[str, ...]
    per_rank: tuple[str, ...]
    changes_with_optimizer: tuple[str, ...]


def prepared(
    given: Mapping[str, Stateful], per_rank: Mapping[str, Stateful], changes_with_optimizer: Collection[str]
) -> States:
    """The states by name, without the wrappers of DDP, torch.compile and accelerate. Raises UserError by name."""
    if both := given.keys() & per_rank.keys():
        raise UserError(f"{min(both)!r} is given twice, once in per_rank: give it once")
    given = {**given, **per_rank}
    for name in (RNG, LOSSES):
        if name in given:
            raise UserError(f"a state may not be called {name!r}: a snapshot has one of that name already")
    if unknown := sorted(set(changes_with_optimizer) - given.keys()):
        raise UserError(f"changes_with_optimizer names {unknown[0]!r}, which is no state; there are {sorted(given)}")
    for name, value in given.items():
        _refuse(name, value)
    _check_scalers(given)
    live = {name: unwrapped(value) for name, value in given.items()}
    for name, value in live.items():
        _refuse(name, value)
    saved, sharded = _sharded(live)
    tensors = {
        name: _tried(name, value, in_file=name not in per_rank) for name, value in saved.items() if name not in sharded
    }
    for name, value in saved.items():
        # an optimizer may have no tensors before its first step
        has_file = name not in per_rank and (isinstance(value, nn.Module | Optimizer) or tensors.get(name))
        if has_file and ("/" in name or "\0" in name):
            raise UserError(f"a state has a file of its name, which {name!r} cannot be: leave out the slash")
        if isinstance(value, Optimizer):
            _check_trained(name, value, live, tensors)
    return States(live, saved, sharded, tuple(per_rank), tuple(changes_with_optimizer))


def inner_optimizer(live: Mapping[str, Stateful]) -> str | None:
    """What to say of an optimizer with another one inside that is no state, as SAM has it: torch's `state_dict` leaves
    out what is not in its own `state`. None where there is none.
    """
    known = {id(value) for value in live.values()}
    for name, value in live.items():
        if not isinstance(value, Optimizer) or type(value).state_dict is not Optimizer.state_dict:
            continue
        for attribute, inner in vars(value).items():
            if isinstance(inner, Optimizer) and id(inner) not in known and inner.state is not value.state:
                return (
                    f"{name} has another optimizer inside, {name}.{attribute}, whose state is in no snapshot: a "
                    "resumed run would begin anew with it. Pass both, the inner one first: "
                    f"attach(model, {name}.{attribute}, outer={name})"
                )
    return None


def _refuse(name: str, value: Any) -> None:
    parts = list(value.modules()) if isinstance(value, nn.Module) else [value]
    for module, kind, text in _REFUSED:
        # What nobody has imported nobody has given, and importing it takes seconds.
        refused = getattr(sys.modules.get(module), kind, None)
        if refused is not None and any(isinstance(part, refused) for part in parts):
            raise UserError(f"{name} cannot be saved in a snapshot: {text}")
    if not isinstance(value, Stateful):
        raise UserError(f"{name} is a {type(value).__qualname__} without state_dict() and load_state_dict()")


def _check_scalers(given: Mapping[str, Stateful]) -> None:
    """An optimizer of accelerate's scales by a scaler whose state has to be restored with it."""
    for name, value in given.items():
        scaler = getattr(value, "scaler", None) if isinstance(value, Optimizer) else None
        if isinstance(scaler, GradScaler) and scaler.is_enabled() and all(scaler is not v for v in given.values()):
            raise UserError(
                f"{name} scales its gradients: pass its scaler too, as in attach(…, scaler=accelerator.scaler)"
            )


def _sharded(live: Mapping[str, Stateful]) -> tuple[dict[str, Stateful], tuple[str, ...]]:
    """States of which each rank has a part (FSDP2, tensor parallelism), saved by the names of their parameters."""
    sharded = [name for name, value in live.items() if isinstance(value, nn.Module) and is_sharded(value)]
    saved = dict(live)
    if not sharded:
        return saved, ()
    optimizers = [name for name, value in live.items() if isinstance(value, Optimizer)]
    if sharded != ["model"] or optimizers != ["optimizer"]:
        raise UserError(
            f"{', '.join(sharded)}: of models that are sharded among ranks (FSDP2, DTensor) a snapshot takes one, "
            f"`model`, with one optimizer; {_CHECKPOINT}"
        )
    from ddp_trainer.snapshots.sharded import ShardedOptimizer

    model, optimizer = live["model"], live["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, Optimizer)
    saved["optimizer"] = ShardedOptimizer(model, optimizer)
    return saved, ("model", "optimizer")


def is_sharded(module: nn.Module) -> bool:
    """Whether each rank holds a part of it (FSDP2, DTensor)."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and any(isinstance(parameter, dtensor) for parameter in module.parameters())


def _tried(name: str, value: Stateful, *, in_file: bool) -> list[Tensor]:
    """Its tensors. Looks once at all that a snapshot would have to hold; copies nothing. `in_file` where tensors go to
    a file of theirs, whose format has not every type.
    """
    tensors: dict[str, Tensor] = {}
    try:
        with _left_to_begin(value):
            encode(value.state_dict(), name, tensors)
        if in_file:
            lay_out(tensors)
    except SnapshotError as error:
        raise UserError(f"{name} cannot be saved in a snapshot: {error}") from error
    return list(tensors.values())


@contextmanager
def _left_to_begin(value: Any) -> Iterator[None]:
    """Around a question for its state, for a data loader of torchdata's that has no iterator yet: asked, it makes one,
    with its workers, of the data set and of the epoch of the sampler as they are then. The script may change both
    before its first epoch, and a resumed run would go on in an order that this epoch did not have. So it is left
    without one, with the state that the script has loaded, and as if no random number had been drawn.
    """
    loader = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    if loader is None or not isinstance(value, loader) or getattr(value, "_iterator", None) is not None:
        yield
        return
    loaded = getattr(value, "next_iter_state", None)
    own = (getattr(part, "generator", None) for part in (value, getattr(value, "sampler", None)))
    generators = [(one, one.get_state()) for one in own if isinstance(one, torch.Generator)]
    before = torch.get_rng_state()
    yield
    value.load_state_dict({} if loaded is None else loaded)
    torch.set_rng_state(before)
    for generator, state in generators:
        generator.set_state(state)


def _check_trained(
    name: str, optimizer: Optimizer, live: Mapping[str, Stateful], tensors: Mapping[str, list[Tensor]]
) -> None:
    """What an optimizer trains is in some state; else a resumed run would have its moments, but not its weights."""
    modules = {key: value for key, value in live.items() if isinstance(value, nn.Module)}
    known = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    memory = {tensor.data_ptr() for key in modules.keys() & tensors.keys() for tensor in tensors[key]}
    # what a program makes of its own state may be a copy
    shapes = {
        tensor.shape
        for key, value in live.items()
        if key in tensors and not isinstance(value, nn.Module | Optimizer)
        for tensor in tensors[key]
    }
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        is_trained = parameter.requires_grad and parameter.numel()
        is_held = id(parameter) in known or parameter.data_ptr() in memory or parameter.shape in shapes
        if is_trained and not is_held:
            raise UserError(
                f"{name} trains a parameter of shape {tuple(parameter.shape)} that is in none of the states, so a "
                "resumed run would begin anew with it: pass its module by name, as in attach(…, head=head)"
            )
