# shellcheck shell=bash
# kind: nodes are Docker containers. Sourced by cluster.sh.
#
# Volumes are folders of this host, mounted into both workers at the same path: kind's own provisioner has no ReadWriteMany.
# --control-plane-only is the same cluster here. DDPJOB_KIND_IMAGE names the node image, and with it the version of Kubernetes.

readonly KIND=ddpjob
readonly KIND_VOLUMES=/var/local/ddpjob

kind_up() {
  say "cluster: kind, because Docker runs here"
  mkdir -p "$DIR/volumes"
  kind get clusters 2>/dev/null | grep -x $KIND >/dev/null || kind_config | kind create cluster --name $KIND ${DDPJOB_KIND_IMAGE:+--image "$DDPJOB_KIND_IMAGE"} --config - --kubeconfig "$KUBECONFIG" --wait 180s >&2
  kind export kubeconfig --name $KIND --kubeconfig "$KUBECONFIG" 2>/dev/null
  local node
  for node in $(kind get nodes --name $KIND); do docker start "$node" >/dev/null && docker exec "$node" systemctl start containerd kubelet; done
  kind_kubectl annotate storageclass standard storageclass.kubernetes.io/is-default-class=false --overwrite >/dev/null
  kind_volumes | kind_kubectl apply -f - >/dev/null
  until_ok "all nodes are Ready" 180 kind_kubectl wait node --all --for=condition=Ready --timeout=1s
  kind_status
}

kind_config() {
  echo "{kind: Cluster, apiVersion: kind.x-k8s.io/v1alpha4, nodes: [{role: control-plane}"
  local n
  for ((n = 0; n < NODES; n++)); do echo ", {role: worker, extraMounts: [{hostPath: $DIR/volumes, containerPath: $KIND_VOLUMES}]}"; done
  echo "]}"
}

kind_volumes() {
  local i
  echo '{apiVersion: storage.k8s.io/v1, kind: StorageClass, provisioner: kubernetes.io/no-provisioner,
    metadata: {name: shared, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}}'
  for i in $(seq "${VOLUMES:-64}"); do
    mkdir -p "$DIR/volumes/$i" && chmod 1777 "$DIR/volumes/$i"
    echo "---
{apiVersion: v1, kind: PersistentVolume, metadata: {name: shared-$i}, spec: {storageClassName: shared, capacity: {storage: 100Gi},
 accessModes: [ReadWriteOnce, ReadWriteMany], persistentVolumeReclaimPolicy: Retain, hostPath: {path: $KIND_VOLUMES/$i}}}"
  done
}

kind_kubectl() { docker exec -i $KIND-control-plane kubectl --kubeconfig /etc/kubernetes/admin.conf "$@"; }

kind_status() {
  kind_kubectl get --raw /readyz >/dev/null 2>&1 || die "not running"
  echo "KUBECONFIG=$KUBECONFIG"
}

kind_load() { kind load image-archive --name $KIND "$1" >&2; }

# The worker falls silent: its containers run on, or (--power) die with it.
kind_lose() {
  local node
  node=$(kind get nodes --name $KIND | grep worker | sort | sed -n "${1}p")
  [ -n "$node" ] || die "no worker number $1"
  if [ -n "${2:-}" ]; then docker kill "$node" >/dev/null; else docker exec "$node" systemctl stop kubelet containerd; fi
}

kind_down() {
  kind delete cluster --name $KIND >&2
  # pods wrote these as users of their own
  docker run --rm --network none -v "$DIR:/state" --entrypoint rm "$(docker images -q kindest/node | head -1)" -rf /state/volumes 2>/dev/null || true
  rm -rf "$DIR"
}
