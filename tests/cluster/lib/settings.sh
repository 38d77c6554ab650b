# shellcheck shell=bash
# Where the cluster is on this host: folders, addresses, ports. Sourced by cluster.sh.
# shellcheck disable=SC2034  # read by the files that source this one

# What one `up` made, gone after `down`; and what is expensive to make again.
DIR=${DDPJOB_CLUSTER_DIR:-/var/tmp/ddp-cluster}
# A folder with Kubernetes' programs, to run those and not the ones that are built.
GIVEN=${DDPJOB_KUBERNETES_BIN:-}
CACHE=${DDPJOB_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/ddpjob}
NODES=${NODES:-2}

# Pods get addresses of this /16 and never leave the host. 10.88 would be podman's, 10.244 kind's.
NET=${DDPJOB_CLUSTER_NET:-10.213}
SERVICES=10.96.0.0/16
ADVERTISE=$NET.0.1
BRIDGE=ddp0

if [ -n "$CONTROL_PLANE_ONLY" ]; then
  DIR=$DIR-api
  HOST=127.0.0.1 API_PORT=${DDPJOB_CLUSTER_PORT:-26443}
else
  # A node's address cannot be loopback, so kubelets and API server share the bridge's.
  HOST=$ADVERTISE API_PORT=16443
fi
ETCD_PORT=$((API_PORT + 1)) ETCD_PEER_PORT=$((API_PORT + 2))
readonly DIR GIVEN CACHE NODES NET SERVICES ADVERTISE BRIDGE HOST API_PORT ETCD_PORT ETCD_PEER_PORT

BIN=$CACHE/kubernetes
API=https://$HOST:$API_PORT
KUBECONFIG=$DIR/admin.conf
readonly BIN API KUBECONFIG
export KUBECONFIG

say() { printf '%s\n' "$*" >&2; }
die() { say "cluster: $1" && exit "${2:-1}"; }

# Two `up` at once would start everything twice. Daemons do not inherit the lock (see start).
only_one_at_a_time() {
  exec 9>"$DIR.lock" || die "cannot write $DIR.lock: another user's cluster? set DDPJOB_CLUSTER_DIR"
  flock -w 1200 9 || die "another cluster.sh has been busy with $DIR for 20 minutes"
}
