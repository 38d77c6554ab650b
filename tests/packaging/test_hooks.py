"""The hooks of the chart: the Job after `helm uninstall`, and the Pod of `helm test`."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from tests.packaging.chart import (
    OF_THE_API_SERVER,
    OF_THE_OPERATOR,
    everything,
    of_kind,
    operator_of,
    rendered,
)


@pytest.mark.parametrize("namespaces", [[], ["team-a", "team-b"]])
def test_uninstalling_leaves_no_pod_with_a_finalizer(namespaces: list[str]) -> None:
    """The Job runs after the operator is gone, with an account of its own, which may patch pods and no more."""
    found = everything({"watch": {"namespaces": namespaces}})
    hooks = [m for m in found if m["metadata"].get("annotations", {}).get("helm.sh/hook") == "post-delete"]
    (job,) = of_kind("Job", hooks)
    (account,) = of_kind("ServiceAccount", hooks)
    pod = job["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert pod["containers"][0]["command"] == ["python", "-m", "ddpjob_operator.cluster.release"]
    assert pod["containers"][0]["env"] == [{"name": "DDPJOB_OPERATOR_NAMESPACES", "value": ",".join(namespaces)}]
    roles = of_kind("Role" if namespaces else "ClusterRole", hooks)
    bindings = of_kind("RoleBinding" if namespaces else "ClusterRoleBinding", hooks)
    assert [role["metadata"].get("namespace") for role in roles] == (namespaces or [None])
    assert [role["rules"] for role in roles] == [[{"apiGroups": [""], "resources": ["pods"],
                                                  "verbs": ["get", "list", "patch"]}]] * len(roles)  # fmt: skip
    assert [one["subjects"][0]["name"] for one in bindings] == [account["metadata"]["name"]] * len(roles)
    weights = [int(m["metadata"]["annotations"].get("helm.sh/hook-weight", 0)) for m in (*roles, *bindings, job)]
    assert weights == sorted(weights)


def test_the_job_after_uninstalling_can_be_left_out() -> None:
    kept = everything({"uninstall": {"releasePods": False}})
    assert not [m for m in kept if m["metadata"].get("annotations", {}).get("helm.sh/hook") == "post-delete"]


@pytest.mark.parametrize("own", [True, False], ids=["account of the release", "account that was there"])
def test_without_roles_of_the_chart_the_job_uses_those_of_the_operators_account(own: bool) -> None:
    """An installer that may not make roles may not make them when it uninstalls either."""
    account = {"create": own, "name": "ddpjob"}
    metrics = {"authentication": True, "readers": [{"name": "prometheus", "namespace": "monitoring"}]}
    none = {"rbac": {"create": False, "userRoles": False}, "dashboard": {"enabled": True}}
    found = everything(none | {"metrics": metrics, "serviceAccount": account})
    assert not [m["kind"] for m in found if m["kind"].endswith(("Role", "RoleBinding"))]
    hooks = [m for m in found if m["metadata"].get("annotations", {}).get("helm.sh/hook") == "post-delete"]
    (job,) = of_kind("Job", hooks)
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == "ddpjob"
    # that of the release is gone by then
    assert [one["metadata"]["name"] for one in of_kind("ServiceAccount", hooks)] == (["ddpjob"] if own else [])


def test_the_job_after_uninstalling_needs_no_account_that_may_be_gone_with_the_release() -> None:
    """A parent chart may have made the account that serviceAccount.name names, and its pod would never be created."""
    values = {"serviceAccount": {"create": False, "name": "ddpjob"}, "imagePullSecrets": [{"name": "registry"}]}
    hooks = [m for m in everything(values) if m["metadata"].get("annotations", {}).get("helm.sh/hook") == "post-delete"]
    (job,), (account,), (binding,) = (of_kind(kind, hooks) for kind in ("Job", "ServiceAccount", "ClusterRoleBinding"))
    pod = job["spec"]["template"]["spec"]
    own = "ddpjob-operator-release"
    assert (pod["serviceAccountName"], account["metadata"]["name"]) == (own, own)
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": own, "namespace": "ddpjob-system"}]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_pods_of_hooks_pass_where_the_operators_pod_does() -> None:
    """A quota on limits of CPU refuses a pod without one, and pods of jobs would keep their finalizers."""
    resources = {"requests": {"cpu": "100m"}, "limits": {"cpu": "1", "memory": "1Gi"}}
    values = {"resources": resources}
    found = everything(values)
    (job,), (tester,) = (of_kind(kind, found) for kind in ("Job", "Pod"))
    for pod in (job["spec"]["template"]["spec"], tester["spec"]):
        assert [each["resources"] for each in pod["containers"]] == [operator_of(values)["resources"]]


def test_the_job_after_uninstalling_finds_the_api_server_where_the_operator_does() -> None:
    """It gets nothing else from extraEnv: a Secret may be gone with the release, and the program refuses a setting
    that does not go with others."""
    values = {"extraEnv": [*OF_THE_OPERATOR, *OF_THE_API_SERVER]}
    (job,) = of_kind("Job", everything(values))
    namespaces, *extra = job["spec"]["template"]["spec"]["containers"][0]["env"]
    assert namespaces["name"] == "DDPJOB_OPERATOR_NAMESPACES"
    assert extra == OF_THE_API_SERVER
    assert operator_of(values)["env"][-len(values["extraEnv"]) :] == values["extraEnv"]


def test_pods_of_hooks_reach_what_they_need_where_the_operator_is_isolated() -> None:
    """Another policy of the namespace may let nothing out, and that of the operator is about its own pods alone."""
    mesh = {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "istio-system"}}}]}
    found = everything({"operatorNetworkPolicy": {"mode": "isolated", "extraEgress": [mesh]}})
    policies = {m["metadata"]["name"]: m for m in of_kind("NetworkPolicy", found)}
    assert policies.keys() == {f"ddpjob-operator{suffix}" for suffix in ("", "-release", "-test")}
    (job,), (tester,), (deployment,) = (of_kind(kind, found) for kind in ("Job", "Pod", "Deployment"))
    operator, release, test = (policies[f"ddpjob-operator{suffix}"] for suffix in ("", "-release", "-test"))
    labels = (job["spec"]["template"]["metadata"]["labels"], tester["metadata"]["labels"])
    for policy, of_pod in zip((release, test), labels, strict=True):
        selected = policy["spec"]["podSelector"]["matchLabels"]
        assert selected
        assert of_pod.items() >= selected.items()
        assert [other for other in (*labels, deployment["spec"]["template"]["metadata"]["labels"])
                if other.items() >= selected.items()] == [of_pod]  # fmt: skip
        assert policy["spec"]["policyTypes"] == ["Egress"]
    api_server, dns, _jobs, extra = operator["spec"]["egress"]
    assert release["spec"]["egress"] == [api_server, dns, extra]
    assert release["metadata"]["annotations"] == {
        "helm.sh/hook": "post-delete",
        "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded",
        "helm.sh/hook-weight": "-2",
    }
    ready = {"ports": [{"port": "probes", "protocol": "TCP"}], "to": [{"podSelector": operator["spec"]["podSelector"]}]}
    assert test["spec"]["egress"] == [ready, api_server, dns, extra]


def test_without_isolation_pods_of_hooks_have_no_policy() -> None:
    assert len(of_kind("NetworkPolicy", everything({}))) == 1


@pytest.mark.parametrize("common", [{}, {"sidecar.istio.io/inject": "true", "team": "ml"}])
def test_no_proxy_of_a_service_mesh_outlives_the_program_after_uninstalling(common: dict[str, str]) -> None:
    (job,) = of_kind("Job", everything({"commonLabels": common}))
    template = job["spec"]["template"]["metadata"]
    ours = {"sidecar.istio.io/inject": "false", "app.kubernetes.io/name": "ddpjob-operator-release"}
    assert template["labels"].items() >= (common | ours).items()
    assert template["annotations"] == {"linkerd.io/inject": "disabled"}


class Answer(BaseHTTPRequestHandler):
    """Answers /readyz as the operator does: 503 until it is ready."""

    asked: ClassVar[list[str]] = []
    ready_after: ClassVar[int] = 0

    def do_GET(self) -> None:
        self.asked.append(self.path)
        ready = len(self.asked) > self.ready_after
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(b"ok" if ready else b"the watches have not begun yet")

    def do_POST(self) -> None:
        """As the proxy of a service mesh does, which then ends."""
        self.asked.append(f"POST {self.path}")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(("ready_after", "seconds", "code"), [(0, "60", 0), (1, "60", 0), (99, "0", 1)])
def test_helm_test_passes_once_the_operator_is_ready(ready_after: int, seconds: str, code: int) -> None:
    (test,) = [m for m in everything({}) if m["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"]
    container = test["spec"]["containers"][0]
    program, url, *_ = container["args"]
    service = of_kind("Service", rendered({}))[0]
    (port,) = [item["port"] for item in service["spec"]["ports"] if item["name"] == "probes"]
    assert service["metadata"]["name"] == "ddpjob-operator"
    assert url == f"http://$(DDPJOB_OPERATOR_SERVICE_HOST):{port}/readyz"
    assert test["spec"]["enableServiceLinks"]
    assert container["image"] == operator_of({})["image"]
    assert not test["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    handler = type("Handler", (Answer,), {"asked": [], "ready_after": ready_after})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}/readyz"
        done = subprocess.run([sys.executable, "-c", program, here, seconds], capture_output=True, text=True)
        server.shutdown()
    assert (done.returncode, handler.asked) == (code, ["/readyz"] * min(ready_after + 1, 2 - code)), done.stderr


@pytest.mark.parametrize(("ready_after", "seconds", "code"), [(0, "60", 0), (99, "0", 1)])
def test_helm_test_ends_the_proxy_of_a_service_mesh(ready_after: int, seconds: str, code: int) -> None:
    """Otherwise the pod goes on until its deadline, and the test fails though the operator is ready."""
    (test,) = [m for m in everything({}) if m["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"]
    program, _, _, *proxies = test["spec"]["containers"][0]["args"]
    assert proxies == ["http://127.0.0.1:15020/quitquitquit", "http://127.0.0.1:4191/shutdown"]
    assert test["metadata"]["annotations"]["config.linkerd.io/proxy-admin-shutdown"] == "enabled"
    handler = type("Handler", (Answer,), {"asked": [], "ready_after": ready_after})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        with socket.socket() as absent:
            absent.bind(("127.0.0.1", 0))
            none = f"http://127.0.0.1:{absent.getsockname()[1]}/quitquitquit"
            argv = [sys.executable, "-c", program, f"{here}/readyz", seconds, none, f"{here}/shutdown"]
            done = subprocess.run(argv, capture_output=True, text=True)
        server.shutdown()
    assert (done.returncode, handler.asked) == (code, ["/readyz", "POST /shutdown"]), done.stderr
