"""What a pod may name of the cluster: by a list of the administrator's, or but for what is the cluster's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, make_job
from tests.support.pod_specs import NAMED

from ddpjob_operator.core.manifests.admission import admit
from ddpjob_operator.core.manifests.admitted import Admitted, Refused
from ddpjob_operator.core.manifests.allow_lists import SETTINGS
from ddpjob_operator.core.manifests.initializer import build_initializer
from ddpjob_operator.core.values.job import Bounds


def refusals(bounds: Bounds, spec: dict[str, Any], **more: Any) -> list[str]:
    found = admit(make_job(podTemplate={"spec": spec} | more), replace(DEFAULTS, bounds=bounds))
    return list(found.problems) if isinstance(found, Refused) else []


def only(setting: str, *names: str) -> Bounds:
    return Bounds(allowed={setting: names})


def test_every_list_is_tested() -> None:
    assert {*NAMED, "annotations"} == set(SETTINGS)


@pytest.mark.parametrize("setting", NAMED)
def test_what_a_list_lacks_is_refused(setting: str) -> None:
    spec, name = NAMED[setting]
    assert refusals(Bounds(), spec) == []
    assert refusals(only(setting, name), spec) == []
    assert refusals(only(setting, f"{name[:2]}*"), spec) == []
    (said,) = refusals(only(setting), spec)
    assert f"{name!r} is not among those that this cluster's administrator allows" in said
    assert f"(bounds.{setting})" in said


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_job_that_names_nothing_is_within_every_empty_list(setting: str) -> None:
    assert refusals(only(setting), {}) == []


def test_the_volume_of_submitted_code_needs_no_entry() -> None:
    """It can have ConfigMaps of the job's namespace only; one of that name in a job without code counts."""
    code = {"configMaps": ["first"], "sha256": "0" * 64}
    taken = {"volumes": [{"name": "ddpjob-code", "nfs": {"server": "a", "path": "/"}}]}
    job = make_job(podTemplate={"spec": taken}, code=code)
    assert not isinstance(admit(job, replace(DEFAULTS, bounds=only("volumeTypes"))), Refused)
    assert len(refusals(only("volumeTypes"), taken)) == 1


@pytest.mark.parametrize("coded", [False, True])
def test_a_volume_of_that_name_is_in_no_pod_of_the_initializers_of_a_job_with_code(coded: bool) -> None:
    """The kubelet mounts a volume, and Kubernetes makes an ephemeral one, whether a container has it or not."""
    code = {"code": {"configMaps": ["first"], "sha256": "0" * 64}} if coded else {}
    mine = [{"name": name, "nfs": {"server": "a", "path": "/"}} for name in ("ddpjob-code", "data")]
    initializers = [{"name": "data", "source": "https://example.com/digits.tar", "path": "datasets/digits"}]
    found = admit(make_job(podTemplate={"spec": {"volumes": mine}}, initializers=initializers, **code), DEFAULTS)
    assert isinstance(found, Admitted)
    volumes = build_initializer(found, 0)["spec"]["volumes"]
    assert [item for item in volumes if "nfs" in item] == mine[coded:]


@pytest.mark.parametrize(
    "source",
    [
        {"csi": {"driver": "inline.example"}},
        {"ephemeral": {"volumeClaimTemplate": {"spec": {"resources": {"requests": {"storage": "1Pi"}}}}}},
        {"iscsi": {"targetPortal": "a", "iqn": "b", "lun": 0}},
        {"flexVolume": {"driver": "a/b"}},
    ],
    ids=lambda source: next(iter(source)),
)
def test_a_kind_of_volume_that_is_not_listed_is_refused_by_its_name(source: dict[str, Any]) -> None:
    (kind,) = source
    volumes = {"volumes": [{"name": "data", **source}]}
    (said,) = refusals(only("volumeTypes", "configMap"), volumes)
    assert f"volumes[data]: {kind!r}" in said
    assert refusals(only("volumeTypes", kind), volumes) == []


def test_the_scope_of_a_shared_claim_and_other_claims_can_be_bounded() -> None:
    def refused(**spec: Any) -> list[str]:
        found = admit(make_job(**spec), replace(DEFAULTS, bounds=only("sharedScopes", "Job")))
        return list(found.problems) if isinstance(found, Refused) else []

    own = {"volumes": [{"name": "again", "persistentVolumeClaim": {"claimName": "team"}}]}
    assert refused() == []
    assert refused(shared={"claimName": "team", "scope": "Job"}, podTemplate={"spec": own}) == []
    (said,) = refused(shared={"claimName": "team"})
    assert said.startswith("spec.shared.scope: 'Claim' is not among those")
    (said,) = refused(initializers=[{"name": "data", "path": "data", "source": "pvc://theirs/all"}])
    assert said.startswith("spec.initializers, pvc://theirs: 'Claim' is not among those")


@pytest.mark.parametrize("path", [{"subPath": "logs"}, {"subPath": "."}, {"subPathExpr": "$(POD)"}], ids=str)
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_a_path_within_the_folder_of_a_job_is_refused_where_jobs_must_not_see_each_others_files(
    kind: str, path: dict[str, str]
) -> None:
    """The kubelet follows a link there to anywhere in the claim, such as one to `../other`."""
    claim = {"persistentVolumeClaim": {"claimName": "team"}}
    mounts = [{"name": "again", "mountPath": "/all"}, {"name": "own", "mountPath": "/own", "subPath": "logs"}]

    def refused(bounds: Bounds, *more: dict[str, str], scope: str = "Job") -> list[str]:
        spec = {
            "volumes": [{"name": "again", **claim}, {"name": "own", "emptyDir": {}}],
            kind: [{"name": "sidecar", "volumeMounts": [*mounts, *more]}],
        }
        job = make_job(shared={"claimName": "team", "scope": scope}, podTemplate={"spec": spec})
        found = admit(job, replace(DEFAULTS, bounds=bounds))
        return list(found.problems) if isinstance(found, Refused) else []

    mount = {"name": "again", "mountPath": "/more", **path}
    assert refused(only("sharedScopes", "Job")) == []
    assert refused(Bounds(), mount) == []
    assert refused(only("sharedScopes", "Claim", "Job"), mount) == []
    assert refused(only("sharedScopes", "Claim"), mount, scope="Claim") == []
    (said,) = refused(only("sharedScopes", "Job"), mount)
    field = f"spec.podTemplate.spec.{kind}[sidecar].volumeMounts[/more].{next(iter(path))}"
    assert said.startswith(f"{field}: 'Claim' is not among those")


@pytest.mark.parametrize("source", ["dataSource", "dataSourceRef"])
def test_a_copy_of_a_claim_is_all_of_it(source: str) -> None:
    """Drivers that clone volumes fill a volume of the pod with what another claim has."""

    def refused(bounds: Bounds, **claim: Any) -> list[str]:
        template = {"spec": {"accessModes": ["ReadWriteOnce"], **claim}}
        return refusals(bounds, {"volumes": [{"name": "copy", "ephemeral": {"volumeClaimTemplate": template}}]})

    of_team = {source: {"kind": "PersistentVolumeClaim", "name": "team"}}
    assert refused(Bounds(), **of_team) == []
    assert refused(only("sharedScopes", "Job")) == []
    (said,) = refused(only("sharedScopes", "Job"), **of_team)
    assert said.startswith("spec.podTemplate.spec.volumes[copy].ephemeral: 'Claim' is not among those")


def test_annotations_are_those_of_the_template() -> None:
    given = {"metadata": {"annotations": {"team.example/owner": "a", "k8s.example/net": "b"}}}
    (said,) = refusals(only("annotations", "team.example/*"), {}, **given)
    assert "'k8s.example/net'" in said


def test_the_old_name_of_a_service_account_counts() -> None:
    assert len(refusals(only("serviceAccounts", "default"), {"serviceAccount": "admin"})) == 1


def test_tolerating_everything_is_an_entry_of_its_own() -> None:
    spec = {"tolerations": [{"operator": "Exists"}]}
    assert len(refusals(only("tolerations", "gpu"), spec)) == 1
    assert refusals(only("tolerations", "*"), spec) == []


@pytest.mark.parametrize("name", ["system-node-critical", "system-cluster-critical"])
def test_a_class_of_the_clusters_own_pods_is_refused_unless_it_is_listed(name: str) -> None:
    spec = {"priorityClassName": name}
    assert len(refusals(Bounds(), spec)) == 1
    assert refusals(only("priorityClasses", name), spec) == []


def test_a_claim_for_a_device_is_no_way_around_a_bound() -> None:
    spec, _ = NAMED["resourceClaims"]
    assert len(refusals(Bounds(resources={"nvidia.com/gpu": "8"}), spec)) == 1


def test_the_pod_of_the_initializers_is_held_to_them_too() -> None:
    job = make_job(
        initializers=[{"name": "data", "source": "https://example.com/a", "path": "a"}],
        podTemplate={"spec": {"runtimeClassName": "kata"}},
    )
    found = admit(job, replace(DEFAULTS, bounds=only("runtimeClasses")))
    assert isinstance(found, Refused)


@pytest.mark.parametrize("template", [{}, {"priorityClassName": "low"}, {"priorityClassName": None}], ids=str)
def test_the_priority_class_of_a_pod_group_is_held_to_the_list_whatever_the_template_says(template: Any) -> None:
    scheduling = {"gang": "Volcano", "priorityClassName": "urgent"}
    job = make_job(scheduling=scheduling, podTemplate={"spec": template})
    found = admit(job, replace(DEFAULTS, bounds=only("priorityClasses", "low")))
    assert isinstance(found, Refused)
    (said,) = found.problems
    assert said.startswith("spec.scheduling.priorityClassName: 'urgent'")
    assert not isinstance(admit(job, replace(DEFAULTS, bounds=only("priorityClasses", "low", "urgent"))), Refused)


TOKEN = {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
OF_SIGNER = {"signerName": "kubernetes.io/kube-apiserver-client-pod", "keyType": "ED25519"}
CERTIFICATE = {"name": "certificate", "projected": {"sources": [{"podCertificate": OF_SIGNER}]}}


@pytest.mark.parametrize(
    "spec",
    [
        {"automountServiceAccountToken": True},
        {"automountServiceAccountToken": None},
        {"volumes": [TOKEN]},
        {"volumes": [CERTIFICATE]},
    ],
    ids=["mounted", "mounted by default", "in a volume", "a certificate"],
)
def test_a_pod_with_credentials_and_no_account_has_those_of_default(spec: dict[str, Any]) -> None:
    (said,) = refusals(only("serviceAccounts", "trainer"), spec)
    assert said.startswith("spec.podTemplate.spec.serviceAccountName: 'default'")
    assert refusals(only("serviceAccounts", "default"), spec) == []
    assert refusals(only("serviceAccounts", "trainer"), spec | {"serviceAccountName": "trainer"}) == []
    assert refusals(Bounds(), spec) == []
