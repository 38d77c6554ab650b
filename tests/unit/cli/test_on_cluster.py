"""What every command does that asks a cluster."""

from __future__ import annotations

import resource

import pytest

from ddpjob_operator.cli.on_cluster import MOST_FILES, allow_files


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        pytest.param(256, resource.RLIM_INFINITY, MOST_FILES, id="no bound"),
        pytest.param(1024, 1 << 20, MOST_FILES, id="a high bound"),
        pytest.param(256, 512, 512, id="a low bound"),
        pytest.param(1 << 20, 1 << 20, None, id="high already"),
        pytest.param(resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, id="no limit already"),
        pytest.param(512, 512, None, id="at its bound"),
    ],
)
def test_a_command_may_open_as_many_files_as_the_largest_job_has_pods(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    allow_files()
    assert limits == ([] if raised is None else [(raised, hard)])


def test_a_system_that_refuses_more_files_keeps_no_command_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(which: int, wanted: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1 << 20))
    monkeypatch.setattr(resource, "setrlimit", refused)
    allow_files()
