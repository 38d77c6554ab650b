"""What a rank prints gets a prefix where a line begins, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_trainer.launch.relay import Relay

PREFIX = "[local rank 1] "


def test_a_line_that_is_passed_on_in_parts_has_one_prefix(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    relay = Relay(tmp_path / "pipe", "stdout", PREFIX)
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)
    for part in (b"first\n", b"a" * 40_000, b"b" * 40_000, b"c", b"\n", b"last"):
        os.write(writer, part)
        relay.relay()
    relay.drain()
    os.close(writer)
    relay.close()
    long = "a" * 40_000 + "b" * 40_000 + "c"
    assert capfd.readouterr().out.splitlines() == [f"{PREFIX}first", f"{PREFIX}{long}", f"{PREFIX}last"]
