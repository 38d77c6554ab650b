"""Kubeconfig files, several at once or without what they often have: kubectl decides what is right."""

from __future__ import annotations

import asyncio
import os
import pwd
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.aio.client import Configuration

from ddpjob_operator.follow.outage import is_passing
from ddpjob_operator.runtime import login
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import log_in


def write(path: Path, name: str, current: str | None) -> Path:
    """A kubeconfig with one cluster, user and context of this name, and namespace NAME-jobs."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": f"http://{name}.test"}}],
        "users": [{"name": name, "user": {"token": f"token-of-{name}"}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": f"{name}-jobs"}}],
    }
    path.write_text(yaml.safe_dump(config if current is None else config | {"current-context": current}))
    return path


@pytest.mark.parametrize(
    ("currents", "context", "chosen"),
    [
        (("dev", "prod"), None, "dev"),
        ((None, "prod"), None, "prod"),
        (("", "prod"), None, "prod"),
        (("dev", ""), None, "dev"),
        (("prod", "dev"), None, "prod"),
        (("dev", "prod"), "prod", "prod"),
        ((None, None), "dev", "dev"),
        (("deleted", None), "prod", "prod"),
    ],
)
async def test_the_context_is_the_one_that_kubectl_uses(
    currents: tuple[str | None, str | None],
    context: str | None,
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two files the first one that names a current context decides; one that is asked for needs none."""
    files = [write(tmp_path / name, name, current) for name, current in zip(("dev", "prod"), currents, strict=True)]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, files)))
    found = await log_in(context)
    assert (found.server, found.namespace) == (f"http://{chosen}.test", f"{chosen}-jobs")
    assert found.headers["Authorization"] == f"Bearer token-of-{chosen}"


async def test_a_user_without_a_home_directory_may_name_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a container's, whose number no account has."""

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setenv("KUBECONFIG", str(write(tmp_path / "dev", "dev", "dev")))
    assert (await log_in()).server == "http://dev.test"
    monkeypatch.delenv("KUBECONFIG")
    with pytest.raises(ApiError, match="kubeconfig"):
        await log_in()


@pytest.mark.parametrize(
    ("current", "context", "said"),
    [
        ("dev", "prd", "there is no context prd; it has dev"),
        ("deleted", None, "there is no context deleted; it has dev"),
        (None, None, "it names no current context; name one with --context, or kubectl config use-context"),
    ],
)
async def test_a_context_that_is_not_there_is_named_with_those_that_are(
    current: str | None, context: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "config", "dev", current)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(ApiError) as refused:
        await log_in(context)
    assert refused.value.message == f"cannot use the kubeconfig {file}: {said}"


async def test_a_context_is_not_the_cluster_of_the_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a notebook in a pod: `ddpjob --context prod cancel` ended the job of that name in the pod's own cluster."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    asked: list[Configuration] = []
    monkeypatch.setattr(login, "load_incluster_config", asked.append)
    for none in (None, ""):
        await log_in(none)
    assert len(asked) == 2
    with pytest.raises(ApiError, match="there is no kubeconfig, and so no context prod; name one in"):
        await log_in("prod")
    assert len(asked) == 2


TOKEN = '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "fresh"}}'


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes the kubeconfig of a user with a login plugin; a text is what a shell runs as the plugin."""

    def make(script: str | None, **fields: Any) -> None:
        own = {"command": "no-such-plugin"} if script is None else {"command": "sh", "args": ["-c", script]}
        given = {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "IfAvailable", **own, **fields}
        config = yaml.safe_load(write(tmp_path / "config", "dev", "dev").read_text())
        config["users"][0]["user"] = {"exec": given}
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))

    return make


@pytest.mark.processes
async def test_what_a_plugin_says_is_shown_and_its_token_used(
    plugin: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"""echo "type $CODE in a browser" >&2; test "$KUBERNETES_EXEC_INFO" && echo '{TOKEN}'"""
    plugin(script, env=[{"name": "CODE", "value": "ABCD"}])
    assert (await log_in()).headers["Authorization"] == "Bearer fresh"
    assert capsys.readouterr().err == "type ABCD in a browser\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "fields", "said"),
    [
        (None, {}, "no-such-plugin cannot be run: No such file or directory; install it, and see that PATH has it"),
        (None, {"installHint": "Install it\nfrom x.test"}, "No such file or directory; Install it from x.test"),
        ("echo The SSO session has expired >&2; exit 255", {}, "exit code 255: The SSO session has expired; log in as"),
        ("exit 3", {}, "sh ended with exit code 3; log in as for kubectl"),
        ("echo no JSON", {}, "sh answered no ExecCredential"),
        ("echo '[]'", {}, "sh answered no ExecCredential"),
        ("""echo '{"apiVersion": "client.authentication.k8s.io/v1"}'""", {}, "answered neither a token nor"),
        (f"echo '{TOKEN}'", {"apiVersion": "client.authentication.k8s.io/v1beta1"}, "write the kubeconfig anew"),
        (None, {"command": None}, "has no command or no apiVersion"),
    ],
)
async def test_a_plugin_that_gives_no_credentials_is_the_error(
    plugin: Callable[..., None], script: str | None, fields: dict[str, Any], said: str
) -> None:
    """Without credentials the answer was about what `system:anonymous` may not do, with advice to ask for a role."""
    plugin(script, **fields)
    with pytest.raises(ApiError) as refused:
        await log_in()
    assert "cannot use the kubeconfig " in refused.value.message
    assert said in refused.value.message
    assert "\n" not in refused.value.message
    assert not is_passing(refused.value)


@pytest.mark.processes
async def test_a_browser_that_a_plugin_leaves_open_is_not_waited_for(
    plugin: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It has the plugin's standard error: with a pipe the command went on once the browser was closed."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    os.mkfifo(tmp_path / "open")
    plugin(f"""echo log in >&2; cat {tmp_path}/open >&2 & echo '{TOKEN}'""")
    assert (await log_in()).headers["Authorization"] == "Bearer fresh"
    (tmp_path / "open").write_text("")
    assert capfd.readouterr().err == "log in\n"


@pytest.mark.processes
async def test_a_plugin_beside_the_kubeconfig_is_found(plugin: Callable[..., None], tmp_path: Path) -> None:
    """As by kubectl, whatever folder the command is called in."""
    (tmp_path / "login").write_text(f"#!/bin/sh\necho '{TOKEN}'\n")
    (tmp_path / "login").chmod(0o755)
    plugin(None, command="./login")
    assert (await log_in()).headers["Authorization"] == "Bearer fresh"


@pytest.mark.processes
async def test_a_plugin_has_ended_where_the_command_was_stopped(plugin: Callable[..., None], tmp_path: Path) -> None:
    """Ctrl-C while it waits for a person: asyncio printed errors about a process that nothing waits for any more."""
    os.mkfifo(tmp_path / "pid")
    plugin(f"echo $$ >{tmp_path}/pid; exec sleep 1000")
    asking = asyncio.create_task(log_in())
    pid = int(await asyncio.to_thread((tmp_path / "pid").read_text))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
