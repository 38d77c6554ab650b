"""`ddpjob dashboard` as a person starts it, and ends it."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.command import COMMAND
from tests.support.waiting import PATIENCE_SECONDS, eventually


@contextmanager
def dashboard(output: Path, environment: Mapping[str, str], *options: str) -> Iterator[str]:
    """Its URL. It ends by Ctrl-C, at once and without a word, although windows are open."""
    with output.open("wb") as out:
        command = [*COMMAND, "dashboard", *options, "--port", "0"]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:

        def says_where() -> re.Match[str] | None:
            assert process.poll() is None, output.read_text()
            return re.match(r"http://127\.0\.0\.1:\d+", output.read_text())

        yield eventually(says_where, "it says where it is")[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0
        assert len(output.read_text().splitlines()) == 1, output.read_text()
    finally:
        process.kill()
        process.wait()
