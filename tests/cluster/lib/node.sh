# shellcheck shell=bash
# One node: a kubelet with a containerd of its own, in a mount namespace of its own. Sourced by debian.sh.

# node N: starts what of it does not live.
node() {
  local n=$1 dir=$DIR/node-$1
  mkdir -p "$dir"/{containerd,run,kubelet,pods,containers,images}
  cgroup "node-$n"
  # Two kubelets on one host would tidy each other's /var/log/pods away, so each node has its own view of these folders.
  mkdir -p /var/log/pods /var/log/containers /run/netns
  start "mounts-$n" unshare -m --propagation private bash -c \
    "mount --bind $dir/pods /var/log/pods && mount -t tmpfs netns /run/netns && mount --bind $dir/containers /var/log/containers && exec sleep infinity"
  local mounts
  mounts=$(pid_of "mounts-$n")
  local inside=(nsenter -m -t "$mounts")
  until_ok "node $n has its mounts" 20 "${inside[@]}" mountpoint -q /var/log/containers
  with_kept_images "$dir"
  containerd_config "$dir" >"$dir/containerd.toml"
  if ! pid_of "containerd-$n" >/dev/null; then
    local starts
    starts=$(cri_starts "$n")
    start "containerd-$n" "${inside[@]}" containerd -c "$dir/containerd.toml"
    # its socket answers before its CRI does, and a kubelet that is refused there ends
    until_ok "the CRI of node $n has started" 60 cri_started_since "$n" "${starts:-0}"
  fi
  until_ok "containerd of node $n answers" 60 ctr -a "$dir/containerd.sock" version
  import "$n" "$CACHE/pause.tar" localhost/pause:3
  kubelet_config "$n" >"$dir/kubelet.yaml"
  local runtime
  mapfile -t runtime < <(container_runtime)
  start "kubelet-$n" "${inside[@]}" "$(program kubelet)" --config "$dir/kubelet.yaml" --kubeconfig "$KUBECONFIG" --root-dir "$dir/kubelet" \
    "${runtime[@]}" --container-runtime-endpoint "unix://$dir/containerd.sock" --hostname-override "node-$n" \
    --cert-dir "$dir/pki" --node-ip "$HOST"
}

# How often the CRI of a node has started, from containerd's log.
cri_starts() { grep -c 'Start streaming server' "$DIR/logs/containerd-$1.log" 2>/dev/null || true; }

cri_started_since() { [ "$(cri_starts "$1")" -gt "$2" ]; }

# A root for the node's pods in every hierarchy, or in the one of cgroup v2. All pods together count as four of this host's sessions
# when its cores are shared out, not as one: beside the other tests, each of which has some, they would get next to nothing.
cgroup() {
  local name=$1 controller file parent
  if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
    mkdir -p "/sys/fs/cgroup/ddp/$name"
    for parent in /sys/fs/cgroup /sys/fs/cgroup/ddp; do
      for controller in cpuset cpu io memory pids; do echo "+$controller" >"$parent/cgroup.subtree_control" 2>/dev/null || true; done
    done
    echo 400 >/sys/fs/cgroup/ddp/cpu.weight 2>/dev/null || true
    return
  fi
  for controller in cpu cpuacct cpuset memory devices freezer blkio pids systemd; do mkdir -p "/sys/fs/cgroup/$controller/ddp/$name"; done
  for parent in ddp "ddp/$name"; do
    for file in cpus mems; do cat "/sys/fs/cgroup/cpuset/cpuset.$file" >"/sys/fs/cgroup/cpuset/$parent/cpuset.$file"; done
  done
  echo 4096 >/sys/fs/cgroup/cpu/ddp/cpu.shares
}

# restrict_oom_score_adj: a sandboxed root may lack CAP_SYS_RESOURCE, and then cannot lower a score.
containerd_config() {
  cat <<TOML
version = 2
root = "$1/containerd"
state = "$1/run"
[grpc]
  address = "$1/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:3"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$DIR/cni"
TOML
}

# imageGC: the images came from an archive and nobody could pull them again.
kubelet_config() {
  cat <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: /ddp/node-$1
failSwapOn: false
evictionHard: {memory.available: "100Mi", nodefs.available: "1%", imagefs.available: "1%"}
imageGCHighThresholdPercent: 100
address: $HOST
port: $((10260 + $1))
healthzPort: 0
readOnlyPort: 0
clusterDNS: [$HOST]
clusterDomain: cluster.local
nodeStatusUpdateFrequency: 4s
oomScoreAdj: 0
$(cgroup_v1)
YAML
}

# import N ARCHIVE REF: once for the same archive; of an OCI layout, only the blobs that the node lacks.
import() {
  local ctr=(ctr -a "$DIR/node-$1/containerd.sock" -n k8s.io) mark stamp
  mark=$DIR/node-$1/images/$(echo "$3" | tr '/:' '__')
  if [ -d "$2" ]; then stamp=$(cat "$2/index.json"); else stamp=$(stat -Lc '%n %s %Y' "$2"); fi || die "no image at $2"
  [ "$(cat "$mark" 2>/dev/null)" = "$stamp" ] && return
  # containerd's garbage collector may take a layer away between the look and its use: then all of it is sent, again
  feed "$2" lacking "${ctr[@]}" || feed "$2" all "${ctr[@]}" || feed "$2" all "${ctr[@]}" || die "$3 cannot be imported"
  # not grep -q: it would leave early, and ctr would die of the closed pipe
  "${ctr[@]}" images ls -q | grep -xF "$3" >/dev/null || die "$2 holds no image named $3"
  echo "$stamp" >"$mark"
}

# feed ARCHIVE lacking|all CTR…: one try to import it.
feed() {
  local archive=$1 what=$2
  shift 2
  if [ ! -d "$archive" ]; then
    "$@" images import "$archive" >/dev/null
  elif [ "$what" = all ]; then
    tar -C "$archive" -cf - . | "$@" images import - >/dev/null
  else
    missing_blobs "$archive" "$@" | tar -C "$archive" --files-from - -cf - | "$@" images import - >/dev/null
  fi
}

# missing_blobs LAYOUT CTR…: files of an OCI layout, without the blobs that are in the node's content store.
missing_blobs() {
  local layout=$1
  shift
  printf '%s\n' oci-layout index.json
  comm -23 <(cd "$layout/blobs/sha256" && printf '%s\n' * | sort) <("$@" content ls -q | sed 's/^sha256://' | sort) | sed 's,^,blobs/sha256/,'
}

# Every process of the node's pods, found by control group: all of them are ours, whether or not containerd runs.
kill_pods() {
  local pids
  # only one of the two is there, which depends on the version of cgroups
  pids=$(find /sys/fs/cgroup/ddp/"node-$1" /sys/fs/cgroup/systemd/ddp/"node-$1" -name cgroup.procs -exec cat {} + 2>/dev/null | sort -u) || true
  # shellcheck disable=SC2086  # one word a process
  [ -z "$pids" ] || kill -KILL $pids 2>/dev/null || true
}

# containerd's shims outlive it. Ours carry the address of our socket on their command line.
kill_shims() {
  local file pid
  for file in /proc/[0-9]*/cmdline; do
    if { tr '\0' '\n' <"$file"; } 2>/dev/null | grep -xF "$DIR/node-$1/containerd.sock" >/dev/null; then
      pid=${file#/proc/} pid=${pid%/cmdline}
      case $(cat "/proc/$pid/comm" 2>/dev/null) in containerd-shim*) kill -KILL "$pid" 2>/dev/null || true ;; esac
    fi
  done
}

# The node falls silent. Its containers run on and write on, unless the power is cut.
node_lost() {
  stop "kubelet-$1" "containerd-$1"
  [ -z "${2:-}" ] || { kill_pods "$1" && kill_shims "$1"; }
}

node_down() {
  local left=
  stop "kubelet-$1"
  kill_pods "$1"
  if [ "$1" = 1 ] && only_images 1 >>"$DIR/logs/containerd-1.log" 2>&1; then left=images; fi
  stop "containerd-$1"
  kill_shims "$1"
  [ -z "$left" ] || keep_images 1
  stop "mounts-$1"
}
