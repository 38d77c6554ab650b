"""What is done after the exception that ends a script."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import ModuleType

import pytest

from ddp_trainer.rank import failures


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(
    ("module", "done"), [("torch.utils.data._utils.signal_handling", True), ("a_script_of_ones_own", False)]
)
def test_the_end_of_a_data_loader_worker_does_not_interrupt_what_follows_a_failure(
    module: str, done: bool, handler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 71) is killed by signal: Terminated. ")

    def save(error: Exception) -> None:
        os.kill(os.getpid(), signal.SIGCHLD)
        saved.append(error)

    raises.__module__ = module
    saved: list[Exception] = []
    monkeypatch.setattr(failures, "_actions", [save])
    signal.signal(signal.SIGCHLD, raises)
    failures.failed(ValueError("broken batch"))
    assert bool(saved) is done


RUN_AND_REPORT = """
import sys

def run_and_report(func):
    try:
        return func()
    except Exception:
        sys.exit(1)
"""


def _main() -> None:
    raise ValueError("bad sample 17")


def _exits() -> None:
    try:
        _main()
    except ValueError:
        raise SystemExit(3) from None


@pytest.mark.parametrize(
    ("module", "function", "cause"),
    [
        ("hydra._internal.utils", _main, ValueError),
        ("a_script_of_ones_own", _main, SystemExit),  # which may run as a whole in the handler of an ImportError
        ("hydra._internal.utils", _exits, SystemExit),
    ],
    ids=["hydra", "another program", "an exit below hydra"],
)
def test_the_exception_behind_the_exit_of_hydra_is_what_ends_a_script(
    module: str, function: object, cause: type[BaseException]
) -> None:
    """As `run_and_report` of hydra/_internal/utils.py does."""
    caller = ModuleType(module)
    exec(RUN_AND_REPORT, vars(caller))
    with pytest.raises(SystemExit) as left:
        caller.run_and_report(function)
    assert type(failures.behind_exit(left.value)) is cause


def test_what_is_no_exit_is_left_as_it_is() -> None:
    error = ValueError()
    error.__context__ = KeyError()
    assert failures.behind_exit(error) is error
