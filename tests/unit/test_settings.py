"""The operator's environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpjob_operator.settings import BadSetting, load, own_namespace


def test_without_variables_everything_has_a_default() -> None:
    settings = load({})
    assert settings.namespaces == ()
    assert settings.port == 8080
    assert settings.progress_seconds == 10
    assert settings.identity


def test_values_are_read_and_an_empty_one_is_the_default() -> None:
    settings = load(
        {
            "DDPJOB_OPERATOR_NAMESPACES": " a, b ,a,",
            "DDPJOB_OPERATOR_PORT": "9090",
            "DDPJOB_OPERATOR_WORKERS": "",
            "DDPJOB_OPERATOR_LEADER_ELECTION": "False",
            "DDPJOB_OPERATOR_POLL_SECONDS": "0.5",
            "DDPJOB_OPERATOR_LOG_LEVEL": "debug",
            "DDPJOB_OPERATOR_NETWORK_POLICY": "Ingress",
            "DDPJOB_OPERATOR_SCRAPERS": "kubernetes.io/metadata.name=monitoring, example.com/scrapes=",
            "OTHER": "x",
        }
    )
    assert settings.namespaces == ("a", "b")
    assert (settings.port, settings.workers, settings.poll_seconds) == (9090, 16, 0.5)
    assert settings.leader_election is False
    assert settings.network_policy == "ingress"
    assert settings.scrapers == {"kubernetes.io/metadata.name": "monitoring", "example.com/scrapes": ""}
    assert settings.log_level == "DEBUG"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"SHARD": "1"}, "SHARD is 1, but must be 0, or set DDPJOB_OPERATOR_SHARDS"),
        ({"SHARD": "4", "SHARDS": "4"}, "SHARD is 4, but must be 0 to 3"),
        ({"SHARDS": "2", "LEADER_ELECTION": "false"}, "LEADER_ELECTION"),
    ],
)
def test_a_shard_that_does_not_exist_or_has_no_lease_is_refused(given: dict[str, str], named: str) -> None:
    with pytest.raises(BadSetting, match=named):
        load({f"DDPJOB_OPERATOR_{name}": value for name, value in given.items()})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SHARDS", "0"),
        ("SHARDS", "33"),
        ("SHARD", "-1"),
        ("PORT", "http"),
        ("PORT", "70000"),
        ("PORT", "-1"),
        ("WORKERS", "0"),
        ("NAMESPACES", "a/b"),
        ("NAMESPACES", "UPPER"),
        ("SOURCES", "everywhere"),
        ("READERS", "everywhere"),
        ("RESOLVERS", "kube-dns"),
        ("RESOLVERS", "Kube/k8s-app=kube-dns"),
        ("LOG_LEVEL", "loud"),
        ("RESYNC_SECONDS", "nan"),
        ("RESYNC_SECONDS", "1e3"),
        ("LEADER_ELECTION", "maybe"),
        ("NETWORK_POLICY", "on"),
        ("SCRAPERS", "monitoring"),
        ("SCRAPERS", "a=b=c"),
        ("LEASE_NAME", "Training Operator"),
        ("LEASE_NAME", "training..operator"),
        ("LEASE_NAME", "a" * 245),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(BadSetting, match=f"DDPJOB_OPERATOR_{name} is '{value}', but must be"):
        load({f"DDPJOB_OPERATOR_{name}": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NOTIFY_URL", "hooks.example/s3cret"),
        ("NOTIFY_URL", "ftp://hooks.example/s3cret"),
        ("NOTIFY_URL", "https://"),
        ("NOTIFY_URL", "https://user:s3cret@hooks.example/"),
        ("NOTIFY_URL", "https://hooks.example:s3cret/"),
        ("NOTIFY_URL", "https://[s3cret/"),
        ("NOTIFY_URL", "https://hooks.example/s3cret\nHost: other"),
        ("NOTIFY_TOKEN", "s3cret\r\nHost: other"),
    ],
)
def test_a_secret_value_that_cannot_be_used_is_refused_without_being_shown(name: str, value: str) -> None:
    with pytest.raises(
        BadSetting, match=f"DDPJOB_OPERATOR_{name} has a value that cannot be used: it must be"
    ) as error:
        load({f"DDPJOB_OPERATOR_{name}": value})
    assert "s3cret" not in str(error.value)
    assert error.value.__suppress_context__


@pytest.mark.parametrize("name", ["ddp", "ddp.research-2", "a" * 244])
def test_a_lease_may_have_any_name_of_an_object(name: str) -> None:
    assert load({"DDPJOB_OPERATOR_LEASE_NAME": name}).lease_name == name


def test_secret_values_are_read_and_not_shown() -> None:
    url = "https://hooks.example:8443/s3cret?team=ml"
    settings = load({"DDPJOB_OPERATOR_NOTIFY_URL": f"{url}\n", "DDPJOB_OPERATOR_NOTIFY_TOKEN": "s3cret"})
    assert (settings.notify_url, settings.notify_token) == (url, "s3cret")
    assert "s3cret" not in repr(settings)


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(BadSetting, match="DDPJOB_OPERATOR_NAMESPACE is not a setting"):
        load({"DDPJOB_OPERATOR_NAMESPACE": "a"})


def test_the_variables_that_kubelet_makes_for_a_service_of_our_name_are_not_ours() -> None:
    links = {
        "SERVICE_HOST": "10.96.0.9",
        "SERVICE_PORT": "8080",
        "SERVICE_PORT_METRICS": "8080",
        "PORT": "tcp://10.96.0.9:8080",
        "PORT_8080_TCP": "tcp://10.96.0.9:8080",
        "PORT_8080_TCP_ADDR": "10.96.0.9",
    }
    assert load({f"DDPJOB_OPERATOR_{name}": value for name, value in links.items()}).port == 8080


def test_the_namespace_comes_from_the_service_account(tmp_path: Path) -> None:
    file = tmp_path / "namespace"
    file.write_text("training\n")
    assert own_namespace(file) == "training"
    assert own_namespace(tmp_path / "missing") == "default"
