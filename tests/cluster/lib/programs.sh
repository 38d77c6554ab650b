# shellcheck shell=bash
# Which programs of Kubernetes the cluster runs, and what of their flags depends on their version. Sourced by debian.sh.
#
# They are in the folder that DDPJOB_KUBERNETES_BIN names, or in the cache, built from Debian's source package (build.sh). Only
# kube-proxy may be absent from that folder: then the cache's serves.

PROGRAMS=(kube-apiserver kube-controller-manager)
[ -n "$CONTROL_PLANE_ONLY" ] || PROGRAMS+=(kube-scheduler kubelet kube-proxy)
readonly PROGRAMS
declare -A VERSION=()

# Prints the path of a program.
program() {
  if [ -z "$GIVEN" ] || { [ "$1" = kube-proxy ] && [ ! -x "$GIVEN/$1" ]; }; then echo "$BIN/$1"; else echo "$GIVEN/$1"; fi
}

# Whether a program comes from the cache and is not there yet.
must_build() {
  local name path
  for name in "${PROGRAMS[@]}"; do
    path=$(program "$name")
    [ "${path%/*}" != "$BIN" ] || [ -x "$path" ] || return 0
  done
  return 1
}

# A folder that was named and lacks a program is a mistake, and no reason to run another version.
check_given() {
  local name path missing=()
  for name in "${PROGRAMS[@]}"; do
    path=$(program "$name")
    [ "${path%/*}" = "$BIN" ] || [ -x "$path" ] || missing+=("$name")
  done
  [ ${#missing[@]} = 0 ] ||
    die "DDPJOB_KUBERNETES_BIN names $GIVEN, which has no program ${missing[*]}: put the servers of one Kubernetes release there, or unset it to run $BUILT_VERSION"
}

# Asks each program its version, once.
versions() {
  local name
  for name in "${PROGRAMS[@]}"; do
    VERSION[$name]=$("$(program "$name")" --version 2>&1 | sed -n 's/^Kubernetes v//p') || true
    [ -n "${VERSION[$name]}" ] || die "$(program "$name") --version does not say which Kubernetes it is of: is it a program of this kind of machine?"
  done
}

# since MINOR NAME: is this program of Kubernetes 1.MINOR or newer?
since() { [ "$(cut -d. -f2 <<<"${VERSION[$2]}")" -ge "$1" ]; }

# The state of one version is not for another: etcd's data cannot go back, and a cluster that runs is the one it was started as.
claim_state() {
  local there
  there=$(cat "$DIR/version" 2>/dev/null) || there=${VERSION[kube-apiserver]}
  [ "$there" = "${VERSION[kube-apiserver]}" ] ||
    die "$DIR holds a cluster of Kubernetes $there, and ${VERSION[kube-apiserver]} is asked for (DDPJOB_KUBERNETES_BIN: ${GIVEN:-not set}): run 'cluster.sh down${CONTROL_PLANE_ONLY:+ --control-plane-only}' first"
  mkdir -p "$DIR"/{logs,run,pki}
  echo "${VERSION[kube-apiserver]}" >"$DIR/version"
}

# Controller manager and scheduler: nobody asks them, and two clusters may live here. 1.24 took the port without TLS away.
no_ports() {
  since 24 "$1" || echo "--port=0"
  echo "--secure-port=0"
}

# 1.24 took dockershim away, which was the default, and 1.27 the flag.
container_runtime() { since 24 kubelet || echo "--container-runtime=remote"; }

# From 1.35 on, a kubelet does not start on cgroup v1 unless it is told to; 1.31 is the first to know the field.
cgroup_v1() { ! since 31 kubelet || echo "failCgroupV1: false"; }

# Before 1.21 kube-proxy asks for the beta of EndpointSlice, which API servers have no more since 1.25.
endpoints() { since 21 kube-proxy || ! since 25 kube-apiserver || echo "--feature-gates=EndpointSliceProxying=false"; }
