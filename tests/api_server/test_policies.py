"""The chart's ValidatingAdmissionPolicies, on an API server that has them: they refuse what the operator would refuse,
nothing else, and nothing that the operator does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml
from tests.api_server.conftest import NewCluster, StartOperator
from tests.api_server.harness import TEST_AGENT, Cluster, Object
from tests.support.pod_specs import BAD_ANNOTATIONS, BROKEN, CONTEXT, NAMED, WITHIN
from tests.support.waiting import eventually_async

from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.cluster import paths
from ddpjob_operator.core.manifests.admission import admit
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.values.job import Defaults
from ddpjob_operator.core.values.names import FINALIZER
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import log_in
from ddpjob_operator.settings import Settings
from ddpjob_operator.tenancy import load_defaults
from ddpjob_operator.wire.jobs import InvalidJob, parse_job

CHART = Path(__file__).parents[2] / "charts" / "ddpjob-operator"
DRY = "?dryRun=All"
SINCE = 30
"""Kubernetes 1.30."""


def rendered(release: str, **values: Any) -> list[Object]:
    """The policies of a release, and their bindings."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render({"fullnameOverride": release, **values}, name=release, namespace=release)
    return [
        found for name in files if "/admissionpolicy-" in name for found in yaml.safe_load_all(files[name]) if found
    ]


GRANTS: dict[str, Object] = {
    "baseline": {},
    "privileged": {"podSecurity": "privileged"},
    "restricted": {"podSecurity": "restricted"},
    "networked": {"hostNetwork": True},
    "sized": {"maxNodes": 4, "maxProcsPerNode": 2, "resources": {"cpu": 4, "example.com/fpga": "1"}},
    "listed": {name: [NAMED[name][1], "ok-*"] for name in NAMED} | {"annotations": ["ok-*"]},
    "bare": {name: [] for name in (*NAMED, "annotations")},
}
"""Bounds by tenant."""


@dataclass(frozen=True, slots=True)
class Installed:
    """Both policies, for namespaces with the bounds of `GRANTS`."""

    system: Cluster
    """The operator's own namespace."""
    kubeconfig: Path
    """Of the operator's account, which may do all that no policy forbids it."""
    operator: Client
    """The same account."""
    tenants: dict[str, Cluster]

    def tenancy(self) -> Object:
        granted = {found.namespace: {"bounds": GRANTS[name]} for name, found in self.tenants.items()}
        return {"defaults": {"resources": {"limits": {"cpu": "1"}}}, "namespaces": granted}


Install = Callable[..., Awaitable[Installed]]


@pytest.fixture
async def install(
    new_cluster: NewCluster, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Install]:
    """Installs them for some tenants. Skips on an older server, which is supported, whatever DDPJOB_REQUIRE names."""
    if (minor := await cluster.minor_version()) < SINCE:
        pytest.skip(f"Kubernetes 1.{minor} has no ValidatingAdmissionPolicy; 1.{SINCE} and newer have")
    kubeconfig, made = await account_of(cluster, tmp_path / "operator.conf")
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    login = await log_in()
    operator = Client(replace(login, headers={**login.headers, "User-Agent": TEST_AGENT}), in_flight=4)
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))

    async def make(*tenants: str) -> Installed:
        found = Installed(cluster, kubeconfig, operator, {name: await new_cluster() for name in tenants})
        served = [tenant.namespace for tenant in found.tenants.values()]
        made.extend(rendered(cluster.namespace, watch={"namespaces": served}, tenancy=found.tenancy()))
        for manifest in made:
            await cluster.client.create(*cluster_wide(manifest), manifest)
        limited = found.tenants["sized"]

        async def enforced() -> bool:
            confined = await refusal(operator.create(paths.pods(cluster.namespace) + DRY, "pods", pod("probe")))
            return "namespace of the cluster" in confined and "maxNodes" in await answer(limited, {"nodes": 5})

        await eventually_async(enforced, "the policies are enforced")
        return found

    yield make
    await operator.close()
    for manifest in made:
        path, resource = cluster_wide(manifest)
        with suppress(ApiError):
            await cluster.client.delete(f"{path}/{manifest['metadata']['name']}", resource)


async def account_of(system: Cluster, kubeconfig: Path) -> tuple[Path, list[Object]]:
    """Make the operator's account and a kubeconfig with a token of it; returned with what grants it all rights."""
    name = system.namespace
    await system.kubeconfig_of(name, kubeconfig)
    rbac = "rbac.authorization.k8s.io"
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": system.namespace}],
    }
    return kubeconfig, [binding]


def cluster_wide(manifest: Object) -> tuple[str, str]:
    """The collection of an object that is in no namespace, and its resource."""
    path, resource = paths.children(manifest["apiVersion"], manifest["kind"], "none")
    return path.replace("/namespaces/none", ""), resource


def job(tenant: Cluster, spec: Object) -> Object:
    metadata = {"name": "digits", "namespace": tenant.namespace}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


async def refusal(call: Awaitable[Object]) -> str:
    """What the API server says to a call that a policy forbids; else what became of it."""
    try:
        await call
    except ApiError as error:
        return error.message if "ValidatingAdmissionPolicy" in error.message else f"not by a policy: {error}"
    return "accepted"


async def answer(tenant: Cluster, spec: Object) -> str:
    """The same for a new job, which is only tried."""
    return await refusal(tenant.client.create(paths.jobs(tenant.namespace) + DRY, "ddpjobs", job(tenant, spec)))


Cases = dict[str, Object]
"""Specs of jobs by what they are about."""


def of_the_standard() -> Cases:
    """Each case of the Pod Security Standard; one of a container also with the trainer and with an init container."""
    found: Cases = {}
    for row, specs in (*BROKEN.items(), ("within", WITHIN)):
        for index, spec in enumerate(specs):
            found[f"{row} {index}"] = template(**spec)
            for (given,) in filter(None, [spec.get("containers")]):
                rest = {name: value for name, value in spec.items() if name != "containers"}
                found[f"{row} {index}, trainer"] = template(**rest, containers=[given | {"name": "trainer"}])
                found[f"{row} {index}, init"] = template(**rest, initContainers=[given])
    for name, value in BAD_ANNOTATIONS.items():
        for annotation in (value, "localhost/mine"):
            metadata = {"annotations": {name: annotation}}
            found[f"{name}: {annotation}"] = {"podTemplate": {"metadata": metadata}}
    found["as large as a template may be"] = template(
        initContainers=[container(f"c{index}", 1) for index in range(200)],
        volumes=[{"name": f"v{index}", "emptyDir": {}} for index in range(1000)],
    )
    del found["restricted: Seccomp 1"], found["restricted: Seccomp 1, trainer"], found["restricted: Seccomp 1, init"]
    del found["restricted: Volume Types 20"]
    return found


def template(**spec: Any) -> Object:
    return {"podTemplate": {"spec": spec}}


def container(name: str, cpu: str | int) -> Object:
    return {"name": name, "image": "a", "securityContext": CONTEXT, "resources": {"limits": {"cpu": cpu}}}


NULLS = ("containers", "initContainers", "volumes", "hostPID", "tolerations", "schedulerName", "nodeName")
TOKEN = {"serviceAccountToken": {"path": "token"}}
CERTIFICATE = {"podCertificate": {"signerName": "kubernetes.io/kube-apiserver-client-pod", "keyType": "ED25519"}}
TAINT = "node.kubernetes.io/unreachable"
OF_ALL: Cases = {
    "nothing": {},
    "nulls": template(**dict.fromkeys(NULLS)),
    "no context": template(securityContext=None),
    "no context of the trainer": template(containers=[{"name": "trainer", "securityContext": None}]),
    "one context of two": template(securityContext=None, containers=[{"name": "trainer", "securityContext": CONTEXT}]),
    "host network": {"placement": {"hostNetwork": True}},
    "host network, taken back": {"placement": {"hostNetwork": True}} | template(hostNetwork=False),
    "host port": template(containers=[{"name": "trainer", "ports": [{"containerPort": 1, "hostPort": 1}]}]),
    "a token": template(automountServiceAccountToken=True),
    "a token by default": template(automountServiceAccountToken=None),
    "a token in a volume": template(
        volumes=[{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]
    ),
    "a certificate of the pod": template(volumes=[{"name": "c", "projected": {"sources": [CERTIFICATE]}}]),
    "the old name of an account": template(serviceAccount="ok-trainer"),
    "a class of the cluster's": template(priorityClassName="system-node-critical"),
    "a class of the group": {"scheduling": {"gang": "Volcano", "priorityClassName": "high"}},
    "a scheduler of the gang": {"scheduling": {"gang": "Volcano"}},
    "everything tolerated": template(tolerations=[{"operator": "Exists"}]),
    "a lost node tolerated": template(tolerations=[{"key": TAINT, "operator": "Exists", "tolerationSeconds": 5}]),
    "annotations": {"podTemplate": {"metadata": {"annotations": {"ok-team": "a", "other": "b"}}}},
    "4 nodes": {"nodes": 4},
    "5 nodes": {"nodes": 5},
    "a spare too many": {"nodes": 4, "spares": 1, "restart": {"scope": "InPlace"}},
    "2 ranks": {"procsPerNode": 2},
    "3 ranks": {"procsPerNode": 3},
    "3 ranks, one for each GPU": {"resources": {"limits": {"nvidia.com/gpu": 3}}},
    "4 CPUs": {"resources": {"limits": {"cpu": "4000m"}}},
    "5 CPUs": {"resources": {"limits": {"cpu": 5}}},
    "no CPU, which is no limit": {"resources": {"limits": {"cpu": 0}}},
    "5 CPUs of a container": template(containers=[container("side", "5")]),
    "a device": {"resources": {"limits": {"example.com/fpga": 1}}},
    "two devices": {"resources": {"limits": {"example.com/fpga": "2"}}},
    "another device": {"resources": {"requests": {"example.com/asic": 1}, "limits": {"example.com/asic": 1}}},
    "a claim of a device": template(resourceClaims=[{"name": "gpu", "resourceClaimName": "mine"}]),
    **{setting: template(**spec) for setting, (spec, _) in NAMED.items()},
}
LEFT_TO_THE_OPERATOR: Cases = {
    "5 CPUs of two containers": template(containers=[container("one", 3), container("two", 2)]),
    "no limit": template(containers=[{"name": "side", "image": "a", "securityContext": CONTEXT}]),
}
"""What the policy does not add up, nor look for."""


def verdict(defaults: Defaults, tenant: Cluster, spec: Object) -> str:
    """Of the operator on the same job."""
    try:
        found = admit(parse_job(job(tenant, spec)), defaults)
    except InvalidJob:
        return "invalid"
    return "\n".join(found.problems) if isinstance(found, Refused) else "accepted"


async def test_the_policy_refuses_what_the_operator_would_refuse_and_nothing_else(
    install: Install, tmp_path: Path
) -> None:
    installed = await install(*GRANTS)
    file = tmp_path / "tenancy.yaml"
    file.write_text(yaml.safe_dump(installed.tenancy()))
    granted = load_defaults(Settings(config=str(file)))
    refused = Counter[str]()
    for name, tenant in installed.tenants.items():
        cases = OF_ALL | (of_the_standard() if name in ("baseline", "restricted") else {})
        answers = await asyncio.gather(*(answer(tenant, spec) for spec in cases.values()))
        for (case, spec), said in zip(cases.items(), answers, strict=True):
            wanted = verdict(granted(tenant.namespace), tenant, spec)
            assert "not by a policy" not in said, f"{case}: {said}"
            assert (said == "accepted") == (wanted == "accepted"), f"{name}, {case}: {said}; the operator: {wanted}"
            refused[name] += said != "accepted"
    assert all(refused[name] for name in GRANTS if name != "privileged"), refused
    for case, spec in LEFT_TO_THE_OPERATOR.items():
        tenant = installed.tenants["sized"]
        assert await answer(tenant, spec) == "accepted", case
        assert verdict(granted(tenant.namespace), tenant, spec) != "accepted", case


def pod(name: str, **metadata: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **metadata},
        "spec": {"schedulerName": "none", "containers": [{"name": "a", "image": "a"}]},
    }


async def test_a_job_that_was_here_before_a_bound_may_be_edited_but_not_enlarged(install: Install) -> None:
    (tenant,) = (await install("sized")).tenants.values()
    elastic = {"nodes": 4, "elastic": {"minNodes": 1}, "podTemplate": {"spec": {"schedulerName": "none"}}}
    await tenant.client.create(paths.jobs(tenant.namespace), "ddpjobs", job(tenant, elastic))
    path = f"{paths.jobs(tenant.namespace)}/digits"

    def edit(body: Object, part: str = "") -> Awaitable[str]:
        return refusal(tenant.client.merge_patch(f"{path}{part}", "ddpjobs", body))

    for part, body in (("", {"spec": {"nodes": 5}}), ("/scale", {"spec": {"replicas": 5}})):
        assert "spec.nodes: with spares, this cluster's administrator allows at most 4" in await edit(body, part)
    assert await edit({"spec": {"nodes": 3}}, "") == "accepted"
    assert await edit({"spec": {"replicas": 4}}, "/scale") == "accepted"
    assert await edit({"spec": {"suspend": True}}) == "accepted"
    assert await edit({"metadata": {"labels": {"team": "a"}}}) == "accepted"


async def test_a_whole_life_of_a_job_is_within_what_the_operator_may_write(
    install: Install, start_operator: StartOperator
) -> None:
    installed = await install("sized")
    tenant = installed.tenants["sized"]
    await start_operator(installed.kubeconfig, NAMESPACES=tenant.namespace, NETWORK_POLICY="ingress")
    await tenant.apply_job(
        ttlSecondsAfterFinished=1,
        restart={"scope": "InPlace", "backoff": {"initialSeconds": 0}},
        initializers=[{"name": "data", "script": "true", "path": "data"}],
        shared={"retain": True},
    )

    async def pods(count: int) -> list[str] | None:
        names = [found["metadata"]["name"] for found in await tenant.pods()]
        return names if len(names) == count else None

    (initializer,) = await eventually_async(lambda: pods(1), "the pod of the initializers exists")
    await tenant.ends(initializer)
    first = [found["metadata"]["name"] for found in await tenant.gang_exists()]
    await tenant.runs(*first)
    await tenant.phase_is("Running")
    await deny_all(installed, tenant, first[0])
    await tenant.ends("digits-0-1", code=1)
    await eventually_async(lambda: replaced(tenant), "the pod that failed is replaced, the other continues")
    await tenant.runs("digits-0-0", "digits-1-1")
    await tenant.phase_is("Running")
    await tenant.ends("digits-0-0", "digits-1-1")

    async def gone() -> bool:
        with suppress(ApiError):
            await tenant.job()
            return False
        return True

    await eventually_async(gone, "the job is deleted when its time is over")
    if tenant.audit is not None:
        assert [str(entry) for entry in await tenant.asked() if entry.code in (403, 422)] == []


async def test_pods_that_have_lost_their_job_are_let_go(install: Install, start_operator: StartOperator) -> None:
    """The garbage collector has taken their owner away, by `kubectl delete ddpjob --cascade=orphan`."""
    installed = await install("sized")
    tenant = installed.tenants["sized"]
    operator = await start_operator(installed.kubeconfig, NAMESPACES=tenant.namespace)
    await tenant.apply_job()
    names = [found["metadata"]["name"] for found in await tenant.gang_exists()]
    await tenant.runs(*names)
    await tenant.phase_is("Running")
    await operator.kill()
    orphan = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Orphan"}
    await tenant.client.delete(f"{paths.jobs(tenant.namespace)}/digits", "ddpjobs", orphan)

    async def orphaned() -> bool:
        return not any(found["metadata"].get("ownerReferences") for found in await tenant.pods())

    await eventually_async(orphaned, "no pod has an owner")
    assert await tenant.finalizers() == [FINALIZER] * 2
    path, image = f"{paths.pods(tenant.namespace)}/{names[0]}", "/spec/containers/0/image"
    evil = [{"op": "replace", "path": image, "value": "evil"}]
    assert "and nothing else" in await refusal(installed.operator.json_patch(path, "pods", evil))
    assert "only what a DDPJob owns" in await refusal(installed.operator.delete(path, "pods"))
    await start_operator(installed.kubeconfig, NAMESPACES=tenant.namespace)
    await tenant.released()
    await tenant.reap(*names)


async def replaced(tenant: Cluster) -> bool:
    labels = {found["metadata"]["name"]: found["metadata"].get("labels", {}) for found in await tenant.pods()}
    attempts = {name: found.get("training.ddpjob.io/attempt") for name, found in labels.items()}
    return attempts.get("digits-0-0") == attempts.get("digits-1-1") == "1"


async def deny_all(installed: Installed, tenant: Cluster, running: str) -> None:
    """What whoever has the operator's token might do with it, each with what the policy says."""
    call, pods, services = installed.operator, paths.pods(tenant.namespace), paths.services(tenant.namespace)
    found = await call.get(f"{pods}/{running}", "pods")
    (owner,), labels = found["metadata"]["ownerReferences"], found["metadata"]["labels"]
    (service,) = [item["metadata"]["name"] for item in (await call.list(services, "services"))[0]]
    await tenant.client.create(pods, "pods", pod("mine"))
    ours, node = {"ownerReferences": [owner], "labels": labels}, {"apiVersion": "v1", "kind": "Node"}
    image = {"op": "replace", "path": "/spec/containers/0/image", "value": "evil"}
    cases = [
        (call.create(pods, "pods", pod("a")), "only what a DDPJob owns"),
        (call.create(pods, "pods", pod("a", labels=labels)), "only what a DDPJob owns"),
        (call.create(pods, "pods", pod("a", labels=labels, ownerReferences=[owner | node])), "only what a DDPJob owns"),
        (call.create(pods, "pods", pod("a", **ours | {"labels": {}})), "has the label"),
        (call.create(paths.pods("kube-system"), "pods", pod("a", **ours)), "namespace of the cluster"),
        (call.create(paths.pods(installed.system.namespace), "pods", pod("a", **ours)), "namespace of the cluster"),
        (call.delete(f"{pods}/mine", "pods"), "only what a DDPJob owns"),
        (call.merge_patch(f"{pods}/mine", "pods", {"metadata": ours}), "only what a DDPJob owns"),
        (call.json_patch(f"{pods}/{running}", "pods", [image]), "and nothing else"),
        (call.merge_patch(f"{pods}/{running}", "pods", {"metadata": {"ownerReferences": None}}), "changes no owner"),
        (call.merge_patch(f"{services}/{service}", "services", {"spec": {"type": "NodePort"}}), "of type ClusterIP"),
        (call.merge_patch(f"{services}/{service}", "services", {"spec": {"externalIPs": ["192.0.2.1"]}}), "ClusterIP"),
        (call.merge_patch(f"{services}/{service}", "services", {"spec": {"selector": None}}), "pods of its own job"),
        (call.delete(f"{paths.jobs(tenant.namespace)}/digits", "ddpjobs"), "only a DDPJob that has ended"),
    ]
    for request, said in cases:
        assert said in (told := await refusal(request)), f"{said}: {told}"
