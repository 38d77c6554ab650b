"""Which proxy is used for an API server: Go's rules, by which kubectl decides."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import log_in
from ddpjob_operator.runtime.proxy import proxy_of_environment

PROXY = "http://proxy.test:3128"
EKS = "https://abc.gr7.eu-west-1.eks.amazonaws.com"


@pytest.mark.parametrize(
    ("server", "no_proxy", "is_used"),
    [
        (EKS, "", True),
        (EKS, "localhost,.cluster.local", True),
        (EKS, "amazonaws.com", False),
        (EKS, " .amazonaws.com ", False),
        (EKS, "*.amazonaws.com", False),
        (EKS, "EKS.amazonaws.com:443", False),
        (EKS, "amazonaws.com:6443", True),
        (EKS, "zonaws.com", True),
        (EKS, "*", False),
        ("https://example.test:6443", ".example.test", True),
        ("https://example.test:6443", "example.test", False),
        ("https://10.1.2.3:6443", "10.0.0.0/8", False),
        ("https://10.1.2.3:6443", "10.0.0.0/16,no/network", True),
        ("https://10.1.2.3:6443", "10.1.2.3", False),
        ("https://10.1.2.3:6443", "10.1.2.3:443", True),
        ("https://[fd00::1]:6443", "fd00::/8", False),
        ("https://[fd00::1]:6443", "[fd00::1]:6443", False),
        ("https://[fd00::1]:6443", "fd00::1", False),
        ("https://[fd00::1]:6443", "fd00::2", True),
        ("https://127.0.0.1:6443", "", False),
        ("https://[::1]:6443", "", False),
        ("https://localhost:6443", "", False),
        ("http://plain.test", "", False),
    ],
)
def test_a_proxy_is_used_but_for_what_is_excluded(server: str, no_proxy: str, is_used: bool) -> None:
    environment = {"HTTPS_PROXY": PROXY, "NO_PROXY": no_proxy}
    assert proxy_of_environment(server, environment) == (PROXY if is_used else None)


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        ({"https_proxy": "proxy.test:3128"}, PROXY),
        ({"HTTPS_PROXY": "http://ann:secret@proxy.test"}, "http://ann:secret@proxy.test"),
        ({"HTTPS_PROXY": "https://proxy.test"}, None),
        ({"HTTP_PROXY": PROXY}, None),
        ({"HTTPS_PROXY": "socks5://localhost:1080"}, None),
        ({"HTTPS_PROXY": PROXY, "no_proxy": "amazonaws.com"}, None),
        ({}, None),
    ],
)
def test_it_is_named_as_other_programs_name_it(environment: dict[str, str], proxy: str | None) -> None:
    assert proxy_of_environment(EKS, environment) == proxy


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    return tmp_path / "config"


def write(path: Path, **cluster: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "a", "cluster": {"server": EKS, **cluster}}],
        "users": [{"name": "a", "user": {"token": "t"}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "current-context": "a",
    }
    path.write_text(yaml.safe_dump(config))


async def test_the_kubeconfig_has_the_first_word(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(kubeconfig)
    assert (await log_in()).proxy is None
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    assert (await log_in()).proxy == PROXY
    write(kubeconfig, **{"proxy-url": "http://other.test:8080"})
    assert (await log_in()).proxy == "http://other.test:8080"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("socks5://ann:secret@localhost:1080", "proxy-url socks5://localhost:1080 of"),
        ("ann:secret@localhost:1080", "proxy-url localhost:1080 of"),
    ],
)
async def test_a_proxy_that_cannot_be_used_is_named_without_its_password(url: str, said: str, kubeconfig: Path) -> None:
    """The request was sent to the SOCKS proxy as HTTP, and the advice was to check that the cluster runs."""
    write(kubeconfig, **{"proxy-url": url})
    with pytest.raises(ApiError) as refused:
        await log_in()
    assert said in refused.value.message
    assert "ssh -L" in refused.value.message
