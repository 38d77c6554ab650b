"""The end of the last step: what a snapshot of it needs and the next step destroys, so that a failure in the next one
can still leave that snapshot behind.

Until its optimizer begins, a step changes nothing that a snapshot holds but random numbers and the buffers of modules
(running means). So at each step's end a copy of those is kept, and the generators of all ranks set out for rank 0 at
once: after a failure there may be no other rank left to ask. Where no rank draws random numbers, as in most training
without dropout, those that were sent before hold. Where more might have changed, the boundary is lost and says why; a
snapshot of the middle of a step would be worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_trainer.rank.captured_graphs import at_replays
from ddp_trainer.snapshots.codec import rng
from ddp_trainer.snapshots.codec.state import Stateful
from ddp_trainer.snapshots.ranks import Gathering, Ranks
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.values import Progress

_WRAPPERS: Final = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")
MAX_BUFFER_BYTES = 16 << 20
"""Copied in every step: about as long as one millisecond."""

SAMPLED_PARAMETERS: Final = 4
SAMPLED_VALUES: Final = 64
"""Of each of them: enough to notice other weights, and looked at in every step."""

NoneHasDrawn = Callable[[timedelta | None], bool]
"""Whether it is known that no rank has drawn random numbers in the last step: waits so long for the others to say so,
and raises RuntimeError if they do not.
"""


@dataclass(frozen=True, slots=True)
class Unchanged:
    """In place of a gathering: that of an earlier boundary, if no rank has drawn random numbers since."""

    sent: Gathering
    _none_has_drawn: NoneHasDrawn

    def wait(self, timeout: timedelta | None = None) -> Tensor | None:
        """As `Gathering.wait`. Raises SnapshotError if a rank has."""
        if not self._none_has_drawn(timeout):
            raise SnapshotError(
                "a rank has drawn random numbers in the last step, and none in the one before: they are not sent yet"
            )
        return self.sent.wait(timeout)


@dataclass(frozen=True, slots=True)
class Boundary:
    """The end of a step. `buffers` is state -> name -> value, on rank 0."""

    progress: Progress
    generators: Gathering | Unchanged
    own_generators: Tensor
    """Those of this rank."""
    buffers: Mapping[str, Mapping[str, Tensor]]


class Boundaries:
    """Keeps the newest boundary and knows whether the states are still those of it."""

    def __init__(
        self, stateful: Mapping[str, Stateful], ranks: Ranks, *, changes_with_optimizer: Collection[str] = ()
    ) -> None:
        """`changes_with_optimizer` names states, besides modules, optimizers, schedulers and gradient scalers, that
        change only between `begin_update` and `reached`.
        """
        self.newest: Boundary | None = None
        self._ranks = ranks
        self._modules = {name: value for name, value in stateful.items() if isinstance(value, nn.Module)}
        self._own_buffers = {name: _own_buffers(value) for name, value in self._modules.items()}
        self._places = {name: list(_buffers(value)) for name, value in stateful.items()}
        self.obstacle = _obstacle(stateful, self._places, changes_with_optimizer)
        """Why no state of this program can be shown to be that of a boundary; None if it can."""
        self._is_updating = False
        self._captures = rng.Captures()
        trained = _trained(stateful.values())
        self._sampled = _sampled(trained)
        known = {id(parameter) for parameter in trained}
        others = [one for module in self._modules.values() for one in module.parameters() if id(one) not in known]
        self._untrained = _sampled(others)
        """Of what no optimizer trains, such as a momentum encoder, which a forward pass may change."""
        self._sampled_step: int | None = None
        for value in stateful.values():
            before_update(value, self.begin_update)

    def begin_update(self) -> None:
        """From now on the states are no longer those of the last boundary. Every optimizer says so itself."""
        self._is_updating = True

    def step_ended(self, step: int) -> None:
        """The weights are now those after `step`."""
        self._sampled_step = step
        for sample in (*self._sampled, *self._untrained):
            sample.take()

    def other_weights(self, step: int) -> str | None:
        """Why the weights are not those after `step`; None if nothing shows that."""
        if self._sampled_step != step or not any(sample.differs() for sample in self._sampled):
            return None
        return (
            f"the weights are not those of step {step}: something has changed them since, such as an average that was "
            "put in their place for a validation"
        )

    def generators(self) -> Tensor:
        """Those of this rank, now. Nobody may write to the tensor."""
        return self._captures.capture()

    def has_drawn(self, generators: Tensor) -> bool:
        """Whether this rank, with these generators now, may have drawn random numbers since the newest boundary."""
        return self.newest is None or generators is not self.newest.own_generators

    def reached(
        self, progress: Progress, none_has_drawn: NoneHasDrawn | None = None, own_generators: Tensor | None = None
    ) -> Boundary:
        """All states are those after `progress.step`. A collective of all ranks that waits for none in this step.

        With `none_has_drawn`, which all ranks give or none, generators are not sent: where it is true they are those of
        the boundary before. `own_generators` are those of this rank, if they are known.
        """
        before = None if self.newest is None else self.newest.generators
        if isinstance(before, Gathering):
            # Sent a step ago; keeps ranks from running further ahead of rank 0 than that.
            before.wait()
        buffers = {
            name: {key: value.clone() for key, owner, leaf in places if (value := owner.get(leaf)) is not None}
            for name, places in self._places.items()
            if self.obstacle is None and places and self._ranks.rank == 0
        }
        own = self.generators() if own_generators is None else own_generators
        generators: Gathering | Unchanged
        if before is None or none_has_drawn is None:
            generators = self._ranks.begin_gather(own)
        else:
            generators = Unchanged(before if isinstance(before, Gathering) else before.sent, none_has_drawn)
        self.newest = Boundary(progress, generators, own, buffers)
        self._is_updating = False
        return self.newest

    def forget(self) -> None:
        """The ranks of the last boundary are no longer these."""
        self.newest = self._sampled_step = None

    def problem(self) -> str | None:
        """Why the states cannot be shown to be those of the newest boundary; None if they are."""
        if self._is_updating and self.newest is not None:
            return f"step {self.newest.progress.step + 1} had begun to change the weights"
        if self.obstacle is None and self.newest is not None:
            step = self.newest.progress.step
            return self.other_weights(step) or self._other_untrained(step) or self._other_buffers()
        return self.obstacle

    def _other_untrained(self, step: int) -> str | None:
        if self._sampled_step != step or not any(sample.has_other_values() for sample in self._untrained):
            return None
        return (
            f"parameters that no optimizer of the run's trains are not those of step {step}: something has changed "
            "them since, such as a forward pass that updates a momentum encoder"
        )

    def _other_buffers(self) -> str | None:
        """Why a boundary may lack buffers that a snapshot has, or have those of modules that are gone."""
        for name, module in self._modules.items():
            if _owners(self._own_buffers[name]) != _owners(_own_buffers(module)):
                return f"a module of {name} was replaced, or a buffer added, since attach(): change the model before it"
        return None


def before_update(value: Stateful, action: Callable[[], None]) -> None:
    """Call `action` before each update that `value` makes: an optimizer, or a gradient scaler, which may skip it."""
    if isinstance(value, Optimizer):
        value.register_step_pre_hook(lambda *_: None if at_replays(before=action) else action())
    elif isinstance(value, GradScaler):
        update = value.update

        def announced(*args: Any, **kwargs: Any) -> None:
            action()
            update(*args, **kwargs)

        value.update = announced  # type: ignore[method-assign]


class _Sample:
    """Some values of a parameter, as they were. What reads them is made once: beside a step, slicing a tensor takes ten
    times as long as copying the slice.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self._find()

    def _find(self) -> None:
        self._values = self._picked()
        self._taken = self._values.clone()

    def _picked(self) -> Tensor:
        every = -(-self._parameter.numel() // SAMPLED_VALUES) or 1  # its memory may have been freed since
        return self._parameter.detach().reshape(-1)[::every]

    def take(self) -> None:
        if self._has_moved():
            self._find()
        else:
            self._taken.copy_(self._values)

    def differs(self) -> bool:
        """Whether it has other values, or was moved."""
        return self._has_moved() or self.has_other_values()

    def has_other_values(self) -> bool:
        """Wherever they are now: what is not trained may be offloaded between steps."""
        # their bits, which are equal to themselves also where they are NaN
        bits = (tensor.cpu().contiguous().view(torch.uint8) for tensor in (self._taken, self._picked()))
        return not torch.equal(*bits)

    def _has_moved(self) -> bool:
        """Whether another tensor was put in the place of its data."""
        return self._parameter.data_ptr() != self._values.data_ptr()


def _trained(values: Iterable[Stateful]) -> list[Tensor]:
    """The parameters that optimizers change."""
    groups = [group for value in values if isinstance(value, Optimizer) for group in value.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def _sampled(given: Iterable[Tensor]) -> list[_Sample]:
    """Of a few of these parameters, from all over the model."""
    parameters = [
        parameter
        for parameter in given
        if type(parameter) in (Tensor, nn.Parameter) and parameter.numel() and parameter.is_contiguous()
    ]
    return [_Sample(parameter) for parameter in parameters[:: -(-len(parameters) // SAMPLED_PARAMETERS) or 1]]


def _obstacle(
    stateful: Mapping[str, Stateful],
    places: Mapping[str, Iterable[tuple[str, dict[str, Any], str]]],
    changes_with_optimizer: Collection[str],
) -> str | None:
    if not any(isinstance(value, Optimizer) for value in stateful.values()):
        return "no torch.optim.Optimizer is among the states, to tell when it begins to change the weights"
    for name, value in stateful.items():
        if isinstance(value, nn.Module):
            if any(type(module).get_extra_state is not nn.Module.get_extra_state for module in value.modules()):
                return f"{name} has state of its own (get_extra_state) that a forward pass may have changed"
            if _copies_buffers(value, places[name]):
                return f"{name} copies its buffers in its state_dict(), under names of its own"
            saved = [owner[leaf] for _, owner, leaf in places[name] if owner[leaf] is not None]
            if sum(buffer.nbytes for buffer in saved) > MAX_BUFFER_BYTES:
                return f"{name} has more than {MAX_BUFFER_BYTES >> 20} MiB of buffers, too many to keep in every step"
        elif not isinstance(value, Optimizer | LRScheduler | GradScaler) and name not in changes_with_optimizer:
            return (
                f"{name} may have changed since; name it in changes_with_optimizer=… if only the optimizer changes it"
            )
    return None


def _buffers(value: Stateful) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The buffers that are in the module's state: name in it, and where it is found, also after it was replaced.

    A state may have other names than the module (a wrapper for activation checkpointing leaves itself out), and may be
    that of a part of it. So a buffer is found by its memory, and by its own name where the state has a copy of it.
    """
    if not isinstance(value, nn.Module):
        return
    own = _own_buffers(value)
    if not own:
        return
    state = value.state_dict()
    keys: dict[object, list[str]] = {_memory(owner[leaf]): [] for _, owner, leaf in own}
    keys.pop(None, None)
    for key, tensor in state.items():
        keys.get(_memory(tensor), []).append(key)
    taken = {key for found in keys.values() for key in found}
    for name, owner, leaf in own:
        found = keys.get(_memory(owner[leaf]), [])
        if name in found:
            yield name, owner, leaf
        elif found:
            yield from ((key, owner, leaf) for key in found)
        elif _memory(owner[leaf]) is None:  # no value yet, or an empty one: the state has it under one of these
            yield from ((key, owner, leaf) for key in {name, _WRAPPERS.sub("", name)} - taken)
        elif name not in taken and name in state:
            yield name, owner, leaf


def _own_buffers(value: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    return [
        (f"{path}.{leaf}" if path else leaf, module._buffers, leaf)
        for path, module in value.named_modules(remove_duplicate=False)
        for leaf in module._buffers.keys() - module._non_persistent_buffers_set
    ]


def _owners(buffers: Iterable[tuple[str, dict[str, Any], str]]) -> set[tuple[str, int]]:
    return {(name, id(owner)) for name, owner, _ in buffers}


def _copies_buffers(value: nn.Module, places: Iterable[tuple[str, dict[str, Any], str]]) -> bool:
    """Whether a tensor of the state may be the copy of a buffer that was not found in it."""
    places = list(places)
    buffers = {_memory(owner[leaf]) for _, owner, leaf in _own_buffers(value)} - {None}
    if buffers <= {_memory(owner[leaf]) for _, owner, leaf in places}:
        return False
    known, parameters = {key for key, _, _ in places}, {_memory(parameter) for parameter in value.parameters()}
    return any(
        key not in known and _memory(tensor) is not None and _memory(tensor) not in parameters
        for key, tensor in value.state_dict().items()
    )


def _memory(tensor: Any) -> object:
    """Equal for a tensor and what is detached from it; None for one that has no dense memory, and for no tensor."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.numel() == 0:
        return None
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.untyped_storage().data_ptr(), part.storage_offset(), part.dtype, part.shape, part.stride()


def as_of(boundary: Boundary, states: Mapping[str, Any]) -> dict[str, Any]:
    """`states` (name -> state_dict, taken now) with the buffers as they were at the boundary."""
    result = dict(states)
    for name, buffers in boundary.buffers.items():
        for key, value in buffers.items():
            if key in result[name]:
                # A state_dict is the caller's to change: the module makes a new one each time.
                result[name][key] = value
    return result
