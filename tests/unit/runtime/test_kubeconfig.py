"""Kubeconfig files, several at once or without what they often have: kubectl decides what is right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from kubernetes.aio.client import Configuration

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
    await log_in()
    assert len(asked) == 1
    with pytest.raises(ApiError, match="^NoConfiguration: there is no kubeconfig, and so no context prod; name one in"):
        await log_in("prod")
    assert len(asked) == 1
