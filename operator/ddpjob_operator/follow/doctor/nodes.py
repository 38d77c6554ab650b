"""Whether there are nodes for pods and GPUs, with the image on them, and whether clocks agree."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from decimal import Decimal

from ddpjob_operator.follow.doctor.facts import Facts, NodeView, Unread
from ddpjob_operator.follow.doctor.findings import Finding, ok, problem, unknown, warning
from ddpjob_operator.follow.doctor.operator import trainer_image

CLOCK_LIMIT = timedelta(seconds=30)
_MOST_NAMED = 3
_FAILED_IMAGE = re.compile(r'pull(?:ing)? image "([^"]+)"')
_CLAIM = "name resourceClaims in podTemplate, and set procsPerNode"
_LOCAL = "localhost/"
"""Names of images that no registry has."""


def nodes(facts: Facts) -> Finding:
    """Whether some node takes pods that tolerate nothing."""
    if isinstance(facts.nodes, Unread):
        return unknown("nodes", facts.nodes)
    pools = _pools(facts)
    if not facts.nodes and pools:
        return ok("nodes", f"there is none now; {pools}")
    if not facts.nodes:
        return problem("nodes", "the cluster has no node", "add one, or name another cluster with --context")
    usable = [node for node in facts.nodes if node.usable]
    if usable:
        cpus, memory = ([node.allocatable.get(name, Decimal()) for node in usable] for name in ("cpu", "memory"))
        return ok(
            "nodes",
            f"{len(usable)} of {len(facts.nodes)} take pods: {in_units('cpu', sum(cpus, Decimal()))} CPUs and "
            f"{in_units('memory', sum(memory, Decimal()))} in all, at most {in_units('cpu', max(cpus))} CPUs and "
            f"{in_units('memory', max(memory))} on one",
        )
    taints = sorted({taint for node in facts.nodes for taint in node.taints})
    fix = "tolerate one in podTemplate.spec.tolerations" if taints else "kubectl describe nodes; kubectl uncordon"
    states = Counter(_state(node) for node in facts.nodes)
    said = ", ".join(f"{count} {state}" for state, count in states.most_common(_MOST_NAMED))
    if pools and any(node.ready for node in facts.nodes):  # else Karpenter itself may have no node
        return ok("nodes", f"none of {len(facts.nodes)} takes pods now ({said}); {pools}")
    return problem("nodes", f"none of {len(facts.nodes)} takes pods: {said}", fix)


def gpus(facts: Facts) -> Finding:
    """Whether some node has GPUs for pods that tolerate nothing."""
    if isinstance(facts.nodes, Unread):
        return unknown("gpus", facts.nodes)
    claimed = () if isinstance(facts.claimable, Unread) else tuple(item for item in facts.claimable if item.are_gpus)
    known = {item.node for item in claimed}
    silent = [node.name for node in facts.nodes if node.has_gpu_hardware and not node.gpus and node.name not in known]
    if silent:
        unseen = isinstance(facts.claimable, Unread)
        return warning(
            "gpus",
            f"{named(silent)}: GPUs are there, but no device plugin offers them",
            "look at the pods of the device plugin on it, and at the driver"
            + (f"; if pods claim them (DRA), {_CLAIM}" if unseen else ""),
        )
    holders = [node for node in facts.nodes if node.gpus]
    if not holders and claimed:
        drivers = ", ".join(sorted({item.driver for item in claimed}))
        return ok("gpus", f"devices of {drivers}, which pods claim (DRA): {_CLAIM}")
    if not holders and (pools := _pools(facts)):
        return ok("gpus", f"no node offers any now; {pools}, with GPUs if one of them allows such")
    if not holders:
        return warning(
            "gpus",
            "no node offers any; jobs on CPUs are not affected",
            "install the device plugin of the GPUs (nvidia-device-plugin, or NVIDIA's GPU operator), unless an "
            "autoscaler adds nodes with GPUs for pods",
        )
    usable = [node for node in holders if node.usable]
    if not usable:
        taints = sorted({taint for node in holders for taint in node.taints})
        if taints:
            tolerated = "; ".join(map(_toleration, taints))
            # ExtendedResourceToleration, an admission plugin, goes by keys that are names of resources
            of_resources = {_key(taint) for taint in taints} & {name for node in holders for name in node.gpus}
            added = f"; not needed for {named(sorted(of_resources))} if the cluster adds it to such pods, as GKE does"
            return warning(
                "gpus",
                f"every node with GPUs is tainted: {', '.join(taints)}",
                f"in podTemplate.spec.tolerations: {tolerated}{added if of_resources else ''}",
            )
        return warning(
            "gpus", f"no node with GPUs takes pods: {_state(holders[0])}", "kubectl describe node; kubectl uncordon"
        )
    total = Counter[str]()
    for node in usable:
        total.update({name: int(count) for name, count in node.gpus.items()})
    most = max(int(count) for node in usable for count in node.gpus.values())
    offered = ", ".join(f"{count} {name}" for name, count in sorted(total.items()))
    return ok("gpus", f"{offered} on {len(usable)} of {len(facts.nodes)} nodes, at most {most} on one")


def clock(facts: Facts) -> Finding:
    """Whether this machine, the API server and the nodes agree on the time."""
    if facts.server_time is None:
        return unknown("clock", Unread("the answers of the API server have no Date", "compare `date` on both sides"))
    here = facts.local_time - facts.server_time
    if abs(here) > CLOCK_LIMIT:
        way = "ahead of" if here > timedelta() else "behind"
        return warning(
            "clock",
            f"this machine is {_seconds(here)} {way} the API server: ages are wrong, and logins may be refused",
            "set the clock here, such as with chronyd or systemd-timesyncd",
        )
    # a heartbeat may be minutes old, since a kubelet reports changes at once and all else every 5 min, but never newer
    known = () if isinstance(facts.nodes, Unread) else facts.nodes
    ahead = [
        node.name for node in known if node.heartbeat is not None and node.heartbeat - facts.server_time > CLOCK_LIMIT
    ]
    if ahead:
        return warning(
            "clock", f"the clock of {named(ahead)} is ahead of the API server's", "set it: times in logs are wrong"
        )
    beside = "" if known else "; nodes are not seen"
    return ok("clock", f"this machine and the API server differ by {_seconds(here)}{beside}")


def image(facts: Facts) -> Finding:
    """Whether the trainer image is on a node, and which images could not be pulled."""
    wanted = trainer_image(facts)
    present = None if isinstance(facts.nodes, Unread) else {name for node in facts.nodes for name in node.images}
    failed = _failed(facts.failed_pulls)
    there = wanted is not None and present is not None and normal(wanted) in set(map(normal, present))
    if failed:
        fix = "check the name, and imagePullSecrets in podTemplate; the node must reach the registry"
        said = f"pods of {facts.namespace} could not pull {named(failed)} within the last hour"
        of_trainer = wanted is not None and normal(wanted) in map(normal, failed) and not there
        return (problem if of_trainer else warning)("image", said, fix)
    if isinstance(facts.failed_pulls, Unread):
        return unknown("image", facts.failed_pulls)
    if wanted is None:
        return unknown("image", Unread("the operator's Deployment, which names the trainer image, is not seen"))
    if present is None:
        return unknown("image", Unread(f"whether a node has {wanted} is not seen: {_why(facts.nodes)}"))
    if there:
        return ok("image", f"{wanted} is on a node")
    if wanted.startswith(_LOCAL):
        return warning(
            "image",
            f"no node lists {wanted}, and no registry has it",
            "load it on every node, or set trainer.image in the chart, or spec.image, to one in a registry",
        )
    return ok("image", f"{wanted} is on no node yet: the first pod pulls it, and no pull has failed in the last hour")


def normal(name: str) -> str:
    """The whole name of an image, with registry and tag, as kubelets list it."""
    first, slash, _ = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif not ("." in first or ":" in first or first == "localhost"):
        name = f"docker.io/{name}"
    return name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"


def in_units(resource: str, quantity: Decimal) -> str:
    """A quantity as a person reads it: memory and storage in Gi, all else as a number."""
    if resource.endswith(("memory", "storage")):
        return f"{quantity / 2**30:.4g} Gi"
    return f"{quantity.normalize():f}"


def named(names: Iterable[str]) -> str:
    """The first of them."""
    known = list(names)
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    return ", ".join(known[:_MOST_NAMED]) + more


def _pools(facts: Facts) -> str:
    """That nodes are added for pods; empty where nothing is known of that."""
    found = () if isinstance(facts.node_pools, Unread) else facts.node_pools
    return f"Karpenter adds nodes for pods (NodePool {named(found)})" if found else ""


def _state(node: NodeView) -> str:
    if not node.ready:
        return "not ready"
    return "cordoned" if node.cordoned else f"tainted {', '.join(node.taints)}"


def _toleration(taint: str) -> str:
    return f"{{key: {_key(taint)}, operator: Exists, effect: {taint.rpartition(':')[2]}}}"


def _key(taint: str) -> str:
    return taint.rpartition(":")[0].partition("=")[0]


def _failed(messages: tuple[str, ...] | Unread) -> list[str]:
    if isinstance(messages, Unread):
        return []
    return sorted({found[1] for message in messages if (found := _FAILED_IMAGE.search(message))})


def _seconds(difference: timedelta) -> str:
    return f"{abs(difference.total_seconds()):.0f} s"


def _why(unread: object) -> str:
    return unread.why if isinstance(unread, Unread) else ""
