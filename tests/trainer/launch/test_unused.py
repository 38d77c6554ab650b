"""Code and packages that no job uses any more are removed from the volume, and nothing else is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.waiting import eventually
from tests.trainer.launch.submitted import submitted

from ddp_trainer.contract.environment import SubmittedCode
from ddp_trainer.launch import code as launch_code
from ddp_trainer.launch import unused
from ddp_trainer.launch.code import difference as is_different
from ddp_trainer.launch.code import unpack
from ddp_trainer.launch.code_archive import read_archives, read_hashed
from ddp_trainer.launch.requirements import _record
from ddp_trainer.launch.unused import KEEP_DAYS, remove_unused
from ddp_trainer.launch.work_files import copy_code

FILES = {"train.py": "import lib\n", "lib.py": ""}
NOW = time.time()
LONG_AGO = NOW - (KEEP_DAYS + 1) * 86400
LATELY = NOW - (KEEP_DAYS - 1) * 86400


def made(shared: Path, *parts: str, used: float = LONG_AGO) -> Path:
    path = shared.joinpath(*parts)
    path.mkdir(parents=True)
    (path / "file").touch()
    os.utime(path, (used, used))
    return path


def left(shared: Path) -> list[str]:
    return sorted(path.name for folder in ("code", "envs") for path in (shared / folder).glob("*"))


@pytest.fixture
def code(tmp_path: Path) -> SubmittedCode:
    return submitted(tmp_path / "archives", FILES)


@pytest.fixture
def shared(tmp_path: Path, code: SubmittedCode, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A volume with a copy of this code, which nobody has used for long. Removals begin where a test says."""
    monkeypatch.setattr(launch_code, "remove_unused_aside", lambda shared: None)
    shared = tmp_path / "shared"
    unpack(code, shared / "code")
    os.utime(shared / "code" / code.sha256, (LONG_AGO, LONG_AGO))
    return shared


def test_what_no_job_has_used_for_long_goes_and_what_is_not_ours_stays(tmp_path: Path, capfd) -> None:
    made(tmp_path, "code", "a" * 64)
    made(tmp_path, "code", "b" * 64, used=LATELY)
    made(tmp_path, "code", "my-own-code")
    made(tmp_path, "envs", "c" * 32)
    made(tmp_path, "envs", "d" * 32, used=LATELY)
    remove_unused(tmp_path, NOW)
    assert left(tmp_path) == ["b" * 64, "d" * 32, "my-own-code"]
    assert f"envs/{'c' * 12} is removed: no job has used it for 30 days" in capfd.readouterr().err


def test_what_the_working_directory_of_a_job_refers_to_stays_until_it_is_replaced(tmp_path: Path) -> None:
    """However long that job runs."""
    shared, codes = tmp_path / "shared", [submitted(tmp_path / name, {"file": name}) for name in "ab"]
    first, other = (code.sha256 for code in codes)
    env = made(shared, "envs", "c" * 32)
    made(shared, "code", first)
    copy_code(listing(codes[0]), codes[0], shared, "digits")
    _record(shared / "work/.digits/packages.json", env)
    for path in (shared / "code" / first, env):
        os.utime(path, (LONG_AGO, LONG_AGO))
    remove_unused(shared, NOW)
    assert left(shared) == sorted([first, env.name])

    made(shared, "code", other)
    copy_code(listing(codes[1]), codes[1], shared, "digits")
    _record(shared / "work/.digits/packages.json", shared / "envs" / ("d" * 32))
    remove_unused(shared, NOW)
    assert left(shared) == sorted([first, other, env.name]), "the pods before may still end"
    remove_unused(shared, NOW + (KEEP_DAYS + 1) * 86400)
    assert left(shared) == [other]


@pytest.mark.parametrize("content", ["", "[]", '{"sha256": null}'])
def test_a_record_that_names_nothing_keeps_nothing(tmp_path: Path, content: str) -> None:
    made(tmp_path, "code", "a" * 64)
    (tmp_path / "work/.digits").mkdir(parents=True)
    (tmp_path / "work/.digits/code.json").write_text(content)
    remove_unused(tmp_path, NOW)
    assert left(tmp_path) == []


def test_without_all_records_nothing_is_removed(tmp_path: Path, capfd) -> None:
    made(tmp_path, "code", "a" * 64)
    (tmp_path / "work/.digits/code.json").mkdir(parents=True)  # reading it is an OSError also for root
    remove_unused(tmp_path, NOW)
    assert left(tmp_path) == ["a" * 64]
    assert "unused code and packages are not removed" in capfd.readouterr().err


@pytest.mark.parametrize("look", [1, 2])
@pytest.mark.parametrize("early", [True, False])
def test_a_pod_that_starts_in_the_middle_of_a_removal_has_its_code(
    shared: Path, code: SubmittedCode, look: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each of the two looks at the time, between which the folder is renamed."""
    is_old, looks = unused._is_old, []

    def with_a_pod(path: Path, now: float) -> bool:
        looks.append(path)
        if early and len(looks) == look:
            unpack(code, shared / "code")
        found = is_old(path, now)
        if not early and len(looks) == look:
            unpack(code, shared / "code")
        return found

    monkeypatch.setattr(unused, "_is_old", with_a_pod)
    remove_unused(shared, NOW)
    assert len(looks) >= look
    assert is_different(shared / "code" / code.sha256, listing(code)) is None
    assert [path.name for path in (shared / "code").iterdir()] == [code.sha256]


@pytest.mark.parametrize("step", ["mark_used", "difference"])
@pytest.mark.parametrize("early", [True, False])
def test_a_removal_in_the_middle_of_a_start_takes_no_code_from_it(
    shared: Path, code: SubmittedCode, step: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: Callable[..., object] = getattr(launch_code, step)

    def with_a_removal(*arguments: object) -> object:
        if early:
            remove_unused(shared, NOW)
        found = done(*arguments)
        if not early:
            remove_unused(shared, NOW)
        return found

    monkeypatch.setattr(launch_code, step, with_a_removal)
    unpack(code, shared / "code")
    assert is_different(shared / "code" / code.sha256, listing(code)) is None


def test_a_launcher_that_unpacks_removes_what_is_unused(tmp_path: Path, code: SubmittedCode) -> None:
    made(tmp_path, "code", "a" * 64)
    unpack(code, tmp_path / "code")
    eventually(lambda: left(tmp_path) == [code.sha256], "the unused copy is gone")


def listing(code: SubmittedCode) -> launch_code.Listing:
    return read_archives(code, lambda path, mode, content: read_hashed(content))


def test_the_record_of_packages_is_written_once(tmp_path: Path) -> None:
    record = tmp_path / "work/.digits/packages.json"
    _record(record, tmp_path / "envs" / ("a" * 32))
    written = record.stat().st_ino
    _record(record, tmp_path / "envs" / ("a" * 32))
    assert record.stat().st_ino == written
    assert json.loads(record.read_text()) == {"key": "a" * 32}
