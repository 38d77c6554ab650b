"""`python -m ddp_trainer.snapshots` for people."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from ddp_trainer.snapshots.__main__ import main
from ddp_trainer.snapshots.checkpoints import Checkpoints
from ddp_trainer.snapshots.codec.state import Staging
from ddp_trainer.snapshots.trust.manifest import Manifest
from ddp_trainer.snapshots.values import Identity, Progress
from ddpjob_operator.follow.volume_export import Held, parse_held


@pytest.fixture
def models(volume: Any) -> dict[int, torch.nn.Module]:
    """Models by step, of which the volume has snapshots."""
    store = volume.writer()
    models = {}
    for step in (1, 2):
        torch.manual_seed(step)
        models[step] = torch.nn.Linear(3, 2)
        state = {"model": models[step].state_dict()}
        manifest = Manifest("digits", "uid-1", 0, step, 0, step * 8, 1, "ddp", 8, 1763703999.0)
        store.save(lambda directory, state=state: Staging().stage(state).write(directory), manifest)
    return models


def test_ls_shows_newest_first_and_what_is_bad(models: Any, volume: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (volume.step(1) / "manifest.json").unlink()
    assert main(["ls", str(volume.directory)]) == 0
    newest, bad = capsys.readouterr().out.splitlines()
    assert newest.split()[:2] == ["step", "2"]
    assert "periodic" in newest
    assert bad.split()[:3] == ["step", "1", "BAD"]
    assert "manifest.json is missing" in bad


def test_ls_as_json_is_one_object_a_line(models: Any, volume: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (volume.step(1) / "manifest.json").unlink()
    aside = volume.directory / "aside" / "000000000001-000000-uid" / "step-000000000003"
    aside.mkdir(parents=True)
    assert main(["ls", str(volume.directory), "--json"]) == 0
    newest, bad, set_aside = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    size = newest.pop("bytes")
    assert size > 0
    assert newest == {
        "series": "step",
        "step": 2,
        "time": "2025-11-21T05:46:39Z",
        "kind": "periodic",
        "lossIsFinite": True,
        "problem": None,
        "setAside": False,
    }
    assert (bad["step"], bad["time"]) == (1, None)
    assert "manifest.json is missing" in bad["problem"]
    assert set_aside == {"series": "step", "step": 3, "setAside": True}


def test_verify_reads_every_byte_and_its_exit_code_says(
    models: Any, volume: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(volume.directory)]) == 0
    os.truncate(volume.step(2) / "state.json", 3)
    assert main(["verify", str(volume.directory)]) == 1
    assert "step 2: BAD, state.json has 3 bytes" in capsys.readouterr().out
    assert main(["verify", str(volume.directory), "--step", "1"]) == 0


@pytest.mark.parametrize("command", ["verify", "ls"])
def test_what_a_job_removes_meanwhile_is_not_called_bad(
    command: str, models: Any, volume: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has saved another one, and keeps two."""
    read = Manifest.read

    def late(directory: Path) -> Manifest:
        shutil.rmtree(volume.step(1), ignore_errors=True)
        return read(directory)

    monkeypatch.setattr(Manifest, "read", late)
    assert main([command, str(volume.directory)]) == 0
    newest, *older = capsys.readouterr().out.splitlines()
    assert newest.split()[:2] == ["step", "2:" if command == "verify" else "2"]
    assert older == (["step 1: removed meanwhile, as by a job that runs"] if command == "verify" else [])


@pytest.mark.parametrize("command", ["verify", "ls"])
def test_what_a_job_saves_meanwhile_is_shown_where_it_removes_all_that_there_was(
    command: str, models: Any, volume: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It keeps one."""
    shutil.rmtree(volume.step(1))
    store = volume.writer(keep=1)
    read = Manifest.read

    def late(directory: Path) -> Manifest:
        monkeypatch.setattr(Manifest, "read", read)
        volume.save(store, 3)
        return read(directory)

    monkeypatch.setattr(Manifest, "read", late)
    assert main([command, str(volume.directory)]) == 0
    *gone, newest = capsys.readouterr().out.splitlines()
    assert newest.split()[:2] == ["step", "3:" if command == "verify" else "3"]
    assert gone == (["step 2: removed meanwhile, as by a job that runs"] if command == "verify" else [])


def test_verify_of_one_step_that_is_not_there_fails(
    models: Any, volume: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(volume.directory), "--step", "5"]) == 1
    assert capsys.readouterr().out == "step 5: BAD, manifest.json is missing\n"


def test_checkpoints_of_the_program_are_listed_and_verified_too(
    models: Any, volume: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = Checkpoints(volume.directory, keep=2, identity=Identity("digits", "uid-1", 1, 1, 0, 1))
    with checkpoints.writing(Progress(7, 0, 0)) as folder:
        (folder / "model.pt").write_bytes(b"model")
    assert main(["ls", str(volume.directory)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["checkpoint", "7"]
    os.truncate(checkpoints.path(7) / "model.pt", 3)
    assert main(["verify", str(volume.directory)]) == 1
    assert "checkpoint 7: BAD, model.pt has 3 bytes" in capsys.readouterr().out


def test_export_writes_the_newest_valid_model_for_other_programs(models: Any, volume: Any, tmp_path: Path) -> None:
    os.truncate(volume.step(2) / "state.json", 3)
    assert main(["export", str(volume.directory), "--to", str(tmp_path / "out")]) == 0
    plain = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    tensors = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in models[1].state_dict().items():
        assert torch.equal(plain[name], tensor)
        assert torch.equal(tensors[name], tensor)


def test_rm_removes_what_is_named_and_nothing_if_some_of_it_is_not_there(
    models: Any, volume: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rm", str(volume.directory), "--step", "1", "--step", "3"]) == 1
    assert "there is no snapshot of step 3" in capsys.readouterr().err
    assert main(["rm", str(volume.directory), "--step", "2"]) == 0
    assert not [path for path in volume.directory.iterdir() if path.name.endswith("2") or "gone" in path.name]
    assert volume.reader().newest_valid().step == 1


def test_what_an_rm_leaves_that_is_killed_is_removed_by_the_next_writer(
    models: Any, volume: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = volume.directory / "aside" / "000000000001-000000-uid"
    aside.mkdir(parents=True)
    volume.step(1).rename(aside / volume.step(1).name)
    with monkeypatch.context() as patched:
        patched.setattr("ddp_trainer.snapshots.__main__.shutil", SimpleNamespace(rmtree=killed))
        for step in ("1", "2"):
            with pytest.raises(KeyboardInterrupt):
                main(["rm", str(volume.directory), "--step", step])
    volume.writer(1).newest_valid()
    assert list(aside.iterdir()) == []
    assert volume.names() == {"aside"}


def test_an_rm_goes_on_although_a_killed_one_of_the_same_step_was_the_same_process(
    models: Any, volume: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, where numbers of processes begin from 1."""
    aside = volume.directory / "aside" / "000000000001-000000-uid"
    shutil.copytree(volume.step(1), aside / volume.step(1).name)
    with monkeypatch.context() as patched:
        patched.setattr("ddp_trainer.snapshots.__main__.shutil", SimpleNamespace(rmtree=killed))
        with pytest.raises(KeyboardInterrupt):
            main(["rm", str(volume.directory), "--step", "1"])
    assert main(["rm", str(volume.directory), "--step", "1"]) == 0
    assert list(aside.iterdir()) == []
    volume.writer(1).newest_valid()
    assert volume.names() == {"aside", volume.step(2).name}


def killed(path: Path) -> None:
    raise KeyboardInterrupt


def test_export_of_one_step(models: Any, volume: Any, tmp_path: Path) -> None:
    assert main(["export", str(volume.directory), "--step", "2", "--to", str(tmp_path)]) == 0
    torch.nn.Linear(3, 2).load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)


def test_an_export_that_is_held_tells_sizes_and_sums_and_waits(
    models: Any, volume: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("ddp_trainer.snapshots.__main__.time", SimpleNamespace(sleep=waited.append))
    assert main(["export", str(volume.directory), "--to", str(tmp_path), "--hold", "30"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    contents = {name: (tmp_path / name).read_bytes() for name in ("model.pt", "model.safetensors")}
    files = tuple(Held(name, len(found), hashlib.sha256(found).hexdigest()) for name, found in contents.items())
    assert parse_held(line, "model") == (2, files), "the command ddpjob reads it"
    assert waited == [30]


def test_export_says_what_there_is_instead(models: Any, volume: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(volume.directory), "--state", "ema"]) == 1
    assert "has no state 'ema'; it has model" in capsys.readouterr().err


def test_listing_and_verifying_need_no_torch(volume: Any, run_script: Callable[..., Any]) -> None:
    volume.save(volume.writer(), 1)
    program = (
        "import sys; sys.modules['torch'] = None; from ddp_trainer.snapshots.__main__ import main; "
        f"sys.exit(main(['ls', {str(volume.directory)!r}]) or main(['verify', {str(volume.directory)!r}]))"
    )
    done = run_script("-c", program)
    assert done.returncode == 0, done.stderr
    assert "step 1: ok" in done.stdout


def test_a_directory_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(tmp_path / "absent")]) == 2
    assert "absent is not a directory" in capsys.readouterr().out
