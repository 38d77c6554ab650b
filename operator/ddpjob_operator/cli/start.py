"""Where the installed programs begin. They are there without the extra `cli` too, since pip knows no programs of an
extra; then they say what to install. While modules are imported, Ctrl-C ends them without a traceback.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

PACKAGES = ("aiohttp", "jinja2", "kubernetes", "pathspec", "prometheus_client", "rich", "typer")
"""What the extra installs, by the names that are imported."""


def main() -> None:
    """Entry point of `ddpjob` and `kubectl-ddpjob`."""
    _run(_command)


def complete_for_kubectl() -> None:
    """Entry point of `kubectl_complete-ddpjob`."""
    _run(_completion)


def _command() -> None:
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else it is ignored, as in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ddpjob_operator.cli.main import main

    signal.signal(signal.SIGINT, handler)
    try:
        main()
    except KeyboardInterrupt:  # while typer builds the commands; once one runs, typer itself ends it so
        sys.exit(130)


def _completion() -> None:
    from ddpjob_operator.cli.main import complete_for_kubectl

    complete_for_kubectl()


def _run(program: Callable[[], None]) -> None:
    try:
        program()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in PACKAGES:
            raise
        hint = "install ddpjob[cli], as `pip install '.[cli]'` in a checkout does"
        print(f"error: {missing}: not installed for {sys.executable}; {hint}", file=sys.stderr)
        sys.exit(2)
