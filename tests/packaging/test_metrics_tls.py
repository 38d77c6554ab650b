"""TLS on the operator's /metrics: the Secret reaches the operator, and Prometheus trusts what it has."""

from __future__ import annotations

from tests.packaging.chart import VERSIONS, Manifest, of_kind, rendered, settings_of
from tests.support import kubernetes_schemas

WITH_TLS: Manifest = {"metrics": {"tls": {"secretName": "metrics-cert"}}, "serviceMonitor": {"enabled": True}}


def endpoint(values: Manifest) -> Manifest:
    (monitor,) = of_kind("ServiceMonitor", rendered(values))
    found: Manifest = monitor["spec"]["endpoints"][0]
    return found


def test_the_operator_gets_certificate_and_key_of_the_secret_and_nothing_else() -> None:
    (deployment,) = of_kind("Deployment", rendered(WITH_TLS))
    kubernetes_schemas.validate(deployment, VERSIONS[-1], strict=True)
    pod = deployment["spec"]["template"]["spec"]
    (volume,) = [found for found in pod["volumes"] if found["name"] == "metrics-tls"]
    assert volume["secret"]["secretName"] == "metrics-cert"
    assert [item["path"] for item in volume["secret"]["items"]] == ["tls.crt", "tls.key"]
    (mounted,) = [found for found in pod["containers"][0]["volumeMounts"] if found["name"] == "metrics-tls"]
    assert mounted["mountPath"] == settings_of(WITH_TLS)["METRICS_CERTIFICATE"]
    assert mounted["readOnly"]
    assert pod["containers"][0]["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "probes"}


def test_prometheus_checks_the_name_of_the_service_by_the_authority_in_the_secret() -> None:
    found = endpoint(WITH_TLS)
    assert found["scheme"] == "https"
    assert found["tlsConfig"] == {
        "serverName": "ddpjob-operator.ddpjob-system.svc",
        "ca": {"secret": {"name": "metrics-cert", "key": "ca.crt"}},
    }
    own = {"caFile": "/etc/prometheus/ca.crt", "serverName": "operator"}
    assert endpoint(WITH_TLS | {"serviceMonitor": {"enabled": True, "tlsConfig": own}})["tlsConfig"] == own


def test_without_a_secret_metrics_are_plain() -> None:
    assert "METRICS_CERTIFICATE" not in settings_of({})
    assert not {"scheme", "tlsConfig"} & endpoint({"serviceMonitor": {"enabled": True}}).keys()
