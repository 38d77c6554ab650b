"""What is trained: a model, its data, its loss. The loop, the strategies and the snapshots know nothing else
of it.

    class Mine(Task):
        def model(self): return torch.nn.Linear(20, 1)
        def train_dataset(self): return TensorDataset(x, y)
        def loss(self, output, batch): return F.mse_loss(output, batch[1])

    python -m ddp_trainer.train --task my_package.my_module:Mine

A task is chosen by the name of one that ships here, by `package.module:build` where calling
`build(**options)` returns a `Task`, or by the name of an entry point in the group `ddp_trainer.tasks`.
"""

from __future__ import annotations

import difflib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from ddp_trainer.contract.exit_codes import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

ENTRY_POINTS: Final = "ddp_trainer.tasks"

BUILT_IN: Final = {
    "digits": "ddp_trainer.tasks.digits:Digits",
    "tiny_lm": "ddp_trainer.tasks.tiny_lm:TinyLM",
    "toy_linear": "ddp_trainer.tasks.toy_linear:ToyLinear",
    "simple_mlp": "ddp_trainer.tasks.simple_mlp:SimpleMLP",
}
"""Where each task that ships here is built. Named, not imported: a run pays for the one it uses."""


class Task(ABC):
    """One thing to train. Every rank builds its own, so everything in it must follow from its options alone.

    A batch is what `collate` makes of samples: a tensor, or a tuple of tensors whose first is the model's
    input. The first dimension of each counts samples.
    """

    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples; None for `torch.utils.data.default_collate`."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model. Every rank gets the same initial weights, since all seed alike before they call it."""

    @abstractmethod
    def train_dataset(self) -> Dataset[Any]:
        """What is trained on: `len()` and indexing, the same order on every rank."""

    def eval_dataset(self) -> Dataset[Any] | None:
        """What is validated on and never trained on; None for no validation."""
        return None

    def inputs(self, batch: Any) -> Any:
        """What of a batch the model is called with: its first element, or all of it when it is one tensor."""
        return batch[0] if isinstance(batch, tuple | list) else batch

    @abstractmethod
    def loss(self, output: Any, batch: Any) -> Tensor:
        """The mean loss over the samples of the batch, a scalar.

        It must be a mean over samples: micro-batches and ranks are joined by weighting it with their sample
        counts.
        """

    def stage(self, model: nn.Module, index: int, count: int) -> nn.Module:
        """For `--strategy pipeline`: `model` with only what stage `index` of `count` computes, under the same
        names.

        The first stage is called with `inputs`, each other one with what the one before returned, a tensor. A
        Sequential is cut by itself; override this for any other model.
        """
        from torch import nn

        if not isinstance(model, nn.Sequential) or len(model) < count:
            raise UserError(
                f"--strategy pipeline cannot cut a {type(model).__name__} into {count} stages by itself: "
                f"define stage() in {type(self).__name__}"
            )
        for place in range(len(model)):
            if place * count // len(model) != index:
                model[place] = nn.Identity()
        return model

    def score(self, output: Any, batch: Any) -> tuple[Tensor, int] | None:
        """How many predictions of the batch are right, and how many there are; None where right and wrong
        mean nothing.
        """
        return None


def load_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """The task that `--task` names, built with `options`.

    Raises UserError when there is no such task, when it does not take these options, or when what was built
    is no task.
    """
    build = _find(name)
    try:
        task = build(**(options or {}))
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in (options or {}).items()) or "no options"
        raise UserError(f"task {name!r} cannot be built with {given}: {error}") from error
    if not isinstance(task, Task):
        raise UserError(
            f"task {name!r} built a {type(task).__qualname__}, which is no ddp_trainer.tasks.Task: subclass "
            "Task and define model, train_dataset and loss"
        )
    return task


def check_counts(task: str, options: Mapping[str, object]) -> None:
    """Refuse option values that are no numbers of things. Raises UserError."""
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"task {task!r}: {name}={value!r} must be a whole number of at least 1")


def check_share(task: str, name: str, value: object) -> None:
    """Refuse an option value that is no share of a whole. Raises UserError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise UserError(f"task {task!r}: {name}={value!r} must be a number from 0 to 1")


def _find(name: str) -> Callable[..., Any]:
    if name in BUILT_IN:
        return _import(name, BUILT_IN[name])
    if ":" in name:
        return _import(name, name)
    from importlib.metadata import entry_points

    own = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in own:
        return _import(name, own[name].value)
    known = sorted({*BUILT_IN, *own})
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}."
    raise UserError(f"task {name!r} is unknown: {hint} For one of your own, write --task package.module:build.")


def _import(name: str, target: str) -> Callable[..., Any]:
    module_name, _, attribute = target.partition(":")
    if not module_name or module_name.startswith(".") or module_name.endswith(".py") or "/" in module_name:
        raise UserError(
            f"task {name!r}: {module_name!r} is no name of a module: write --task package.module:build, such as "
            "own_task:build for the file own_task.py"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only the module that was asked for is a wrong name; one missing inside it is the module's own
        # failure.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise UserError(
            f"task {name!r}: there is no module {error.name!r}; install it in the image or add its folder to PYTHONPATH"
        ) from error
    build: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(build):
        raise UserError(f"task {name!r}: module {module_name} has nothing callable named {attribute!r}")
    return build
