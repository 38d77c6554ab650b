"""What `send` does with API servers that refuse, or have an older CRD."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpjob import DDPJob
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.submit.check import check
from ddpjob_operator.submit.job import ScriptOptions, script_job
from ddpjob_operator.submit.owner import local_user, with_owner
from ddpjob_operator.submit.send import other_name, send


class Older:
    """An API server whose CRD has no `code`: it drops the field, as all do with what they do not know."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    async def get(self, path: str, resource: str) -> Any:
        if path not in self.objects:
            raise ApiError(404, "NotFound", f"{path} not found", {"name": path.rpartition("/")[2]})
        return self.objects[path]

    get_metadata = get

    async def create(self, path: str, resource: str, body: Any, *, dry_run: bool = False) -> Any:
        spec = {name: value for name, value in (body.get("spec") or {}).items() if name != "code"}
        made = {**body, "metadata": {**body["metadata"], "uid": "1"}, "spec": spec}
        if not dry_run:
            self.objects[f"{path}/{body['metadata']['name']}"] = made
        return made


async def test_to_an_operator_that_does_not_know_the_code_of_jobs_nothing_is_sent(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    server: Any = Older()
    with pytest.raises(ApiError, match="is older than this command"):
        await send(server, "team", DDPJob(script="train.py", folder=tmp_path).submission(), replace=False, note=print)
    assert server.objects == {}


class Pruning(Older):
    """An API server whose CRD lacks three fields more."""

    async def create(self, path: str, resource: str, body: Any, *, dry_run: bool = False) -> Any:
        made = deepcopy(await super().create(path, resource, body, dry_run=dry_run))
        for fields, name in (
            (made["spec"], "nonFiniteLossPolicy"),
            (made["spec"]["snapshots"], "resume"),
            (made["spec"]["restart"]["rules"][1], "reasons"),
            (made["spec"], "image"),
        ):
            del fields[name]
        return made


async def test_fields_that_the_cluster_does_not_know_are_named() -> None:
    rules = [{"action": "Fail", "exitCodes": [3]}, {"action": "Restart", "reasons": ["OutOfMemory"]}]
    spec = {
        "image": None,
        "nonFiniteLossPolicy": "Stop",
        "snapshots": {"keep": 2, "resume": "Own"},
        "restart": {"rules": rules},
    }
    said: list[str] = []
    server: Any = Pruning()
    job = check({**script_job("train.py", ScriptOptions()), "spec": spec}, Path())
    await send(server, "team", job, replace=False, note=said.append)
    assert len(server.objects) == 1
    (note,) = said
    assert note.startswith(
        "the cluster has left out spec.nonFiniteLossPolicy, spec.snapshots.resume, spec.restart.rules[1].reasons: "
    )


class Refusing:
    """An API server that refuses each dry run, and has one job that succeeded."""

    def __init__(self, status: int, message: str) -> None:
        self.error = ApiError(status, "Refused", message)
        self.calls: list[str] = []

    async def get(self, path: str, resource: str) -> Any:
        if "delete" in self.calls:
            raise ApiError(404, "NotFound", f"{path} not found", {"name": path.rpartition("/")[2]})
        return {"metadata": {"name": "train", "uid": "1"}, "status": {"phase": "Succeeded"}}

    async def create(self, path: str, resource: str, body: Any, *, dry_run: bool = False) -> Any:
        name = body["metadata"]["name"]
        if dry_run:
            assert name != "train"
            self.error.message = self.error.message.replace("NAME", name)
            raise self.error
        self.calls.append("create")
        return {**body, "metadata": {"name": name, "uid": "2"}}

    async def delete(self, path: str, resource: str, body: Any) -> None:
        self.calls.append("delete")


JOB = check({**script_job("train.py", ScriptOptions()), "spec": {"nodes": 1}}, Path())


async def test_a_refusal_names_the_job_as_it_was_given_and_leaves_the_other_one() -> None:
    server: Any = Refusing(403, 'ddpjobs "NAME" is forbidden: not on Fridays')
    with pytest.raises(ApiError, match='ddpjobs "train" is forbidden: not on Fridays'):
        await send(server, "team", JOB, replace=True, note=print)
    assert server.calls == []


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "admission webhook owners.example.com does not support dry run"),
        (403, 'ddpjobs "NAME" is forbidden: exceeded quota: jobs, requested: count/ddpjobs=1, used: 1, limited: 1'),
    ],
)
async def test_what_only_a_dry_run_is_refused_for_does_not_hold_up_a_replacement(status: int, message: str) -> None:
    server: Any = Refusing(status, message)
    await send(server, "team", JOB, replace=True, note=print)
    assert server.calls == ["delete", "create"]


class NotRetaining(Refusing):
    """An API server with one job whose volume is deleted with it."""

    def __init__(self, phase: str) -> None:
        super().__init__(400, "admission webhook owners.example.com does not support dry run")
        self.phase = phase

    async def get(self, path: str, resource: str) -> Any:
        job = await super().get(path, resource)
        return {**job, "spec": {"shared": {"retain": False}}, "status": {"phase": self.phase}}


async def test_a_job_whose_volume_goes_with_it_is_not_said_to_leave_a_snapshot() -> None:
    server: Any = NotRetaining("Running")
    with pytest.raises(ApiError, match=r"its volume with it \(.*\), which `ddpjob cancel train --keep` keeps"):
        await send(server, "team", JOB, replace=False, note=print)
    assert server.calls == []


@pytest.mark.parametrize(("phase", "replace"), [("Running", True), ("Failed", False)])
async def test_that_a_volume_goes_with_the_job_that_is_replaced_is_said(phase: str, replace: bool) -> None:
    server: Any = NotRetaining(phase)
    said: list[str] = []
    await send(server, "team", JOB, replace=replace, note=said.append)
    assert said[-1] == "the volume of the train before goes with it, and all snapshots (spec.shared.retain: false)"
    assert server.calls == ["delete", "create"]


@pytest.mark.parametrize(
    ("user", "given", "kept"),
    [
        ("ada", None, "ada"),
        (" Ada Lovelace\n", None, "Ada Lovelace"),
        ("x" * 70, None, "x" * 64),
        ("eve\udcff\x1b", None, "eve"),
        ("ada", "team-vision", "team-vision"),
        ("ada", "", ""),
        ("", None, None),
        ("\t", None, None),
    ],
)
async def test_the_user_who_sends_a_job_is_its_owner_unless_it_names_one(
    user: str, given: str | None, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: user)
    content = JOB.content if given is None else with_owner(JOB.content, given)
    server: Any = Older()
    await send(server, "team", replace(JOB, content=content), replace=False, note=print)
    (created,) = server.objects.values()
    assert created["metadata"].get("annotations") == (None if kept is None else {"training.ddpjob.io/owner": kept})


@pytest.mark.parametrize("error", [KeyError("uid not found: 1000"), OSError("No username set"), ImportError("pwd")])
def test_a_user_without_a_name_is_no_owner(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise error

    monkeypatch.setattr("getpass.getuser", nameless)
    assert local_user() == ""


@pytest.mark.parametrize("name", ["a", "train", "a" * 253, "models.v2-of.the.team.x"])
def test_the_name_of_a_dry_run_is_a_name_and_not_longer_than_that_of_the_job(name: str) -> None:
    other = other_name(name)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", other)
    assert other != name
    assert len(other) <= max(len(name), 10)
