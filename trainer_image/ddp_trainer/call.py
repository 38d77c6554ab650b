"""Calls a function of submitted code on every rank, as `ddpjob.DDPJob(function=…)` asks for.

python -m ddp_trainer.call PACKAGE.MODULE:FUNCTION '{"lr": 0.1}'
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from operator import attrgetter
from types import ModuleType

from ddp_trainer.contract.exit_codes import UserError

MODULE = "ddp_trainer.call"
CLIENT = "ddpjob"
OF_CLIENT = ("ApiError", "AsyncJob", "BadJob", "DDPJob", "Job", "JobFailed", "Snapshot")
"""What a file that submits its own function imports of the Python client."""


def main(argv: Sequence[str]) -> None:
    """Import the module and call its function; what they raise is the rank's failure.

    Raises:
        UserError: there is no such function.
    """
    if len(argv) != 2:
        raise UserError(f"{MODULE} takes PACKAGE.MODULE:FUNCTION and its arguments as JSON, not {list(argv)}")
    target, arguments = argv
    module, _, name = target.partition(":")
    try:
        function = attrgetter(name)(_import(module))
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
    client = ModuleType(CLIENT, "Stands for the Python client, of which a rank uses nothing.")
    for name in OF_CLIENT:
        setattr(client, name, _NotOnARank)
    sys.modules[CLIENT] = client
    return importlib.import_module(module)


class _NotOnARank:
    """Any class of the client."""

    def __init__(self, *_: object, **__: object) -> None:
        raise UserError(
            "the file of the function submits a job where it is imported, as each rank does; write that below "
            "`if __name__ == '__main__':`"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
