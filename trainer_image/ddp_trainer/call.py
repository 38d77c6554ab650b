"""Calls a function of submitted code on every rank, as `ddpjob.DDPJob(function=…)` asks for.

python -m ddp_trainer.call PACKAGE.MODULE:FUNCTION '{"lr": 0.1}'
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from operator import attrgetter

from ddp_trainer.contract.exit_codes import UserError

MODULE = "ddp_trainer.call"


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
        function = attrgetter(name)(importlib.import_module(module))
    except AttributeError as error:
        raise UserError(f"{module} has no function {name}: {error}") from error
    function(**json.loads(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
