"""Where a script is seen in torch: what it calls there is passed on, and reported to the observer.

After an optimizer's step torch has a hook; its other functions are wrapped. What fails while they look ends the
observation, not the script, except for a loss that the script is to end with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

from ddp_trainer.contract.exit_codes import LossNotFinite
from ddp_trainer.rank.batch_sizes import samples_asked_for
from ddp_trainer.rank.data_waits import DataWaits

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

DCP_STATES: Final = "torch.distributed.checkpoint.state_dict"


class Observer(Protocol):
    """What the hooks report to (`observe.ScriptObserver`)."""

    data_waits: DataWaits
    phase: str
    passes: int
    has_stepped: bool
    makes_state: bool

    def fetched(self, batch: object, samples: int | None = None) -> None: ...
    def scaled(self, loss: Tensor, scaled: Tensor) -> None: ...
    def overflowed(self, optimizer: Optimizer) -> None: ...
    def backward_begins(self, root: Tensor) -> None: ...
    def stepped(self, optimizer: Optimizer) -> None: ...
    def evaluated_again(self) -> AbstractContextManager[None]: ...
    def wrap(self, owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None: ...
    def at_close(self, undo: Callable[[], None]) -> None: ...
    def or_give_up(self, look: Callable[..., None], *arguments: Any) -> None: ...
    def give_up(self, error: Exception) -> None: ...


def hook_into_torch(observer: Observer) -> None:
    """Put the hooks in place; torch has been imported."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    def backward_seen(function: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            observer.passes += 1
            if isinstance(tensors, torch.Tensor):
                try:
                    observer.backward_begins(tensors)
                except Exception as error:
                    observer.give_up(error)
            return function(tensors, *args, **kwargs)

        return backward

    def fetch_seen(function: Callable[..., Any]) -> Callable[..., Any]:
        timed = observer.data_waits.timed(function)

        def fetch(iterator: Any) -> Any:
            if observer.phase == "validate":  # the first batches of one are not known to be of it
                observer.data_waits.forget()
            batch = timed(iterator)
            try:
                observer.fetched(batch, samples_asked_for(iterator))
            except Exception as error:
                observer.give_up(error)
            return batch

        return fetch

    def scale_seen(function: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = function(scaler, outputs)
            if isinstance(outputs, torch.Tensor):
                observer.or_give_up(observer.scaled, outputs, scaled)
            return scaled

        return scale

    def scaler_step_seen(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            observer.has_stepped = False
            returned = function(scaler, optimizer, *args, **kwargs)
            if not observer.has_stepped:
                observer.or_give_up(observer.overflowed, optimizer)
            return returned

        return step

    def step_seen(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(optimizer: Any, closure: Callable[[], Any]) -> Any:
            evaluations = 0

            def evaluate() -> Any:
                nonlocal evaluations
                evaluations += 1
                with observer.evaluated_again() if evaluations > 1 else nullcontext():
                    return closure()

            return function(optimizer, evaluate)

        return step

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            observer.stepped(optimizer)
        except LossNotFinite:
            raise
        except Exception as error:
            observer.give_up(error)

    handle = register_optimizer_step_post_hook(stepped)
    observer.at_close(handle.remove)
    observer.wrap(torch.optim.LBFGS, "step", step_seen)
    # Tensor.backward looks it up there at each call
    observer.wrap(torch.autograd, "backward", backward_seen)
    observer.wrap(_BaseDataLoaderIter, "__next__", fetch_seen)
    observer.wrap(torch.amp.grad_scaler.GradScaler, "scale", scale_seen)
    observer.wrap(torch.amp.grad_scaler.GradScaler, "step", scaler_step_seen)


def hook_into_dcp(observer: Observer) -> None:
    """Leave out the steps with gradients of 0 by which `get_state_dict` and `set_state_dict` make the state of an
    optimizer that has none: before a load, and with plain SGD before each save.
    """

    def making(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            observer.makes_state = True
            try:
                return function(*args, **kwargs)
            finally:
                observer.makes_state = False

        return make

    observer.wrap(sys.modules[DCP_STATES], "_init_optim_state", making)
