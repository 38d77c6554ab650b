"""Calls a function of submitted code on every rank, as `ddpjob.DDPJob(function=…)` asks for.

python -m ddp_trainer.call PACKAGE.MODULE:FUNCTION '{"lr": 0.1}'
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from operator import attrgetter
from types import ModuleType
from typing import NoReturn

from ddp_trainer.contract.exit_codes import UserError

MODULE = "ddp_trainer.call"
CLIENT = "ddpjob"
OF_CLIENT = ("ApiError", "AsyncJob", "BadJob", "DDPJob", "Job", "JobFailed", "Snapshot")
"""What a file that submits its own function imports of the Python client."""
NO_CLIENT = "DDPJOB_NO_CLIENT"
"""Says it to processes that a rank spawns."""


def main(argv: Sequence[str]) -> None:
    """Import the module and call its function; what they raise is the rank's failure.

    Raises:
        UserError: there is no such function.
    """
    if len(argv) != 2:
        raise UserError(f"{MODULE} takes PACKAGE.MODULE:FUNCTION and its arguments as JSON, not {list(argv)}")
    target, arguments = argv
    module, _, name = target.partition(":")
    imported = _import(module)
    try:
        function = attrgetter(name)(imported)
    except AttributeError as error:
        raise UserError(f"{module} has no function {name}: {error}") from error
    function(**json.loads(arguments))


def _import(module: str) -> ModuleType:
    """With something in the place of the client, which an image does not have, or not all that it needs."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != CLIENT and f"{CLIENT}[cli]" not in str(error):
            raise
    os.environ[NO_CLIENT] = "1"
    _stand_in()
    return importlib.import_module(module)


def _stand_in() -> None:
    client = ModuleType(CLIENT, "Stands for the Python client, of which a rank uses nothing.")
    for name in OF_CLIENT:
        setattr(client, name, _NotOnARank)
    sys.modules[CLIENT] = client


class _OfTheClass(type):
    """Of `Job`, as `Job.get`."""

    def __getattr__(cls, name: str) -> NoReturn:
        _refuse(name)


class _NotOnARank(Exception, metaclass=_OfTheClass):
    """Any class of the client, its exceptions too. A job may be defined, which does nothing; not be submitted."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(name)


def _refuse(name: str) -> NoReturn:
    if name.startswith("_"):  # Python itself looks whether there is one
        raise AttributeError(name)
    raise UserError(
        f"the file of the function uses the Python client ({name}) as it is imported, which each rank does; write that "
        "below `if __name__ == '__main__':`"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__" and NO_CLIENT in os.environ:  # a process that a rank has spawned imports the file too
    _stand_in()
