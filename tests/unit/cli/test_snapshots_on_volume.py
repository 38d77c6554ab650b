"""`ddpjob snapshots` on the volume of a job on a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from ddpjob_operator.cli import snapshots

NO_DIRECTORY = "error: /mnt/shared/checkpoints/digits is not a directory"


@pytest.mark.parametrize(
    ("code", "lines", "shown"),
    [
        (0, ["10  ok"], (0, "10  ok\n")),
        (0, ["10  BAD  step-10/model is not a directory"], (0, "10  BAD  step-10/model is not a directory\n")),
        (2, [NO_DIRECTORY], (0, "no snapshot of digits is on its volume\n")),
        (1, ["10  BAD"], (1, "10  BAD\n")),
    ],
)
async def test_a_volume_without_the_directory_of_a_job_has_no_snapshot_of_it(
    code: int,
    lines: list[str],
    shown: tuple[int, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def list_on_volume(*_: Any, **__: Any) -> tuple[int, list[str]]:
        return code, lines

    monkeypatch.setattr(snapshots, "list_on_volume", list_on_volume)
    client: Any = None
    assert (await snapshots._list_on_volume(client, "ml", "digits", None), capsys.readouterr().out) == shown
