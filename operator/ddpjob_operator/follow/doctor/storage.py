"""Whether the claim of a job that names nothing of its own gets a volume that all its pods can write."""

from __future__ import annotations

from ddpjob_operator.follow.doctor.facts import Facts, Unread
from ddpjob_operator.follow.doctor.findings import Finding, ok, problem, unknown, warning
from ddpjob_operator.follow.doctor.nodes import named
from ddpjob_operator.wire.objects import Object

_DEFAULT = ("storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class")
_NONE = "kubernetes.io/no-provisioner"
ONE_NODE = frozenset(
    {
        "kubernetes.io/aws-ebs", "ebs.csi.aws.com", "ebs.csi.eks.amazonaws.com", "kubernetes.io/gce-pd",
        "pd.csi.storage.gke.io", "kubernetes.io/azure-disk", "disk.csi.azure.com", "kubernetes.io/cinder",
        "cinder.csi.openstack.org", "kubernetes.io/rbd", "rbd.csi.ceph.com", "rook-ceph.rbd.csi.ceph.com",
        "openshift-storage.rbd.csi.ceph.com", "dobs.csi.digitalocean.com", "linodebs.csi.linode.com",
        "csi.hetzner.cloud", "csi.vultr.com", "csi.scaleway.com", "blockvolume.csi.oraclecloud.com",
        "vpc.block.csi.ibm.io", "diskplugin.csi.alibabacloud.com", "topolvm.io", "topolvm.cybozu.com",
        "openebs.io/local", "local.csi.openebs.io", "zfs.csi.openebs.io", "rancher.io/local-path",
        "hostpath.csi.k8s.io", "k8s.io/minikube-hostpath", "docker.io/hostpath", "microk8s.io/hostpath",
    }
)  # fmt: skip
"""Provisioners of disks, or of folders of one node: what they make is for one Kubernetes node at a time."""
_BUCKETS = frozenset(
    {
        "blob.csi.azure.com", "gcsfuse.csi.storage.gke.io", "ossplugin.csi.alibabacloud.com", "ru.yandex.s3.csi",
        "s3.csi.aws.com",
    }
)  # fmt: skip
"""Drivers that mount buckets: a folder there may not be renamed, or not at once, and snapshots need that."""


def storage(facts: Facts) -> Finding:
    """Whether there is a default StorageClass, and whether it may have ReadWriteMany volumes."""
    if isinstance(facts.classes, Unread):
        return unknown("storage", facts.classes)
    shareable = [_name(item) for item in facts.classes if _provisioner(item) not in (*ONE_NODE, *_BUCKETS, _NONE)]
    other = f"shared.storageClassName: {shareable[0]}, " if shareable else ""
    way_out = f"{other}shared.claimName of a ReadWriteMany claim, or shared.accessMode: ReadWriteOnce on one node"
    defaults = [item for item in facts.classes if _is_default(item)]
    if not defaults and facts.classes:
        return problem(
            "storage", f"no StorageClass is the default; there is {named(map(_name, facts.classes))}", way_out
        )
    if not defaults:
        return problem(
            "storage",
            "there is no StorageClass",
            "install a provisioner of ReadWriteMany volumes, or shared.claimName of a claim that is bound",
        )
    # of several, the API server takes the newest
    chosen = max(defaults, key=lambda item: item["metadata"].get("creationTimestamp") or "")
    provisioner = _provisioner(chosen)
    said = f"the default StorageClass {_name(chosen)} ({provisioner})"
    if provisioner == _NONE:
        return warning("storage", f"{said} makes no volumes: each needs a PersistentVolume made by hand", way_out)
    if provisioner in ONE_NODE:
        return warning("storage", f"{said} has volumes for one node, and a job asks for ReadWriteMany", way_out)
    if provisioner in _BUCKETS and (chosen.get("parameters") or {}).get("protocol") != "nfs":
        return warning("storage", f"{said} mounts buckets, whose folders may not be renamed as snapshots need", way_out)
    return ok("storage", f"{said} is not known to be ReadWriteOnce only")


def _provisioner(storage_class: Object) -> str:
    return str(storage_class.get("provisioner") or "")


def _is_default(storage_class: Object) -> bool:
    annotations = storage_class["metadata"].get("annotations") or {}
    return any(annotations.get(name) == "true" for name in _DEFAULT)


def _name(storage_class: Object) -> str:
    return str(storage_class["metadata"]["name"])
