"""What process 1 of a pod on this machine does with processes that it may not kill; the others need processes."""

from __future__ import annotations

import os

import pytest

from ddpjob_operator.local import container


@pytest.mark.parametrize("of_root", [{7}, {7, 8}])
def test_a_process_of_another_user_does_not_hold_up_the_end_of_a_pod(
    of_root: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script has started it with sudo. The end of the pod was that of the PermissionError, and not the script's."""
    alive, ended = {7, 8}, list[int]()

    def kill(pid: int, number: int) -> None:
        if pid in of_root:
            raise PermissionError(1, "Operation not permitted")
        alive.discard(pid)
        ended.append(pid)

    def collect(pid: int, options: int) -> tuple[int, int]:
        assert options == os.WNOHANG, "it would wait for what it may not kill"
        return (ended.pop(), 9) if ended else (0, 0)

    monkeypatch.setattr(container, "_descendants", lambda: sorted(alive))
    monkeypatch.setattr(container, "_SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(os, "waitpid", collect)
    container._kill_descendants()
    assert alive == of_root
    assert ended == []


def test_what_was_killed_is_waited_for_although_another_may_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with the memory of a GPU takes seconds to be gone; one of root's is there meanwhile."""
    alive, looks = {7, 8}, list[int]()

    def kill(pid: int, number: int) -> None:
        if pid == 7:
            raise PermissionError(1, "Operation not permitted")

    def collect(pid: int, options: int) -> tuple[int, int]:
        looks.append(options)
        if len(looks) != 50:
            return 0, 0
        alive.discard(8)
        return 8, 9

    monkeypatch.setattr(container, "_descendants", lambda: sorted(alive))
    monkeypatch.setattr(container, "_SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(os, "waitpid", collect)
    container._kill_descendants()
    assert alive == {7}
