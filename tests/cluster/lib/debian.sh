# shellcheck shell=bash
# A real cluster on one Debian 12 host, with no container engine and no image registry. Sourced by cluster.sh.
#
# Each kubelet has a containerd of its own; pods hang on one bridge; Services are kube-proxy's iptables rules; volumes are folders.

# shellcheck source=lib/packages.sh
. "$HERE/lib/packages.sh"
# shellcheck source=lib/build.sh
. "$HERE/lib/build.sh"
# shellcheck source=lib/programs.sh
. "$HERE/lib/programs.sh"
# shellcheck source=lib/control_plane.sh
. "$HERE/lib/control_plane.sh"
# shellcheck source=lib/network.sh
. "$HERE/lib/network.sh"
# shellcheck source=lib/kept_images.sh
. "$HERE/lib/kept_images.sh"
# shellcheck source=lib/node.sh
. "$HERE/lib/node.sh"
# shellcheck source=lib/volumes.sh
. "$HERE/lib/volumes.sh"

# Says why not, where it is not.
debian_possible() {
  local why="" capabilities
  if must_build; then
    command -v apt-get >/dev/null && grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release || why="this is not Debian 12, whose packages it is built from"
    [ "$(id -u)" = 0 ] || why=${why:-"installing Debian packages needs root"}
  fi
  if [ -z "$CONTROL_PLANE_ONLY" ]; then
    [ "$(id -u)" = 0 ] || why=${why:-"nodes need root"}
    capabilities=$(awk '/^CapEff:/ {print $2}' /proc/self/status)
    # CAP_NET_ADMIN is bit 12, CAP_SYS_ADMIN bit 21 (capabilities(7))
    (((16#$capabilities >> 12 & 1) && (16#$capabilities >> 21 & 1))) || why=${why:-"root here may neither make a bridge nor mount"}
  fi
  [ -z "$why" ] && return
  die "no cluster here: DDPJOB_TEST_KUBECONFIG is not set, Docker with kind is not there, and the one built from Debian's packages is not possible: $why" 3
}

debian_up() {
  check_given
  ! must_build || build
  versions
  claim_state
  need "${CONTROL_PLANE_PACKAGES[@]}"
  local which="Kubernetes ${VERSION[kube-apiserver]}, built from Debian's packages"
  [ -z "$GIVEN" ] || which="Kubernetes ${VERSION[kube-apiserver]} from $GIVEN"
  if [ -n "$CONTROL_PLANE_ONLY" ]; then
    say "cluster: control plane of $which; no nodes"
    control_plane
    debian_status
    return
  fi
  say "cluster: $NODES nodes of $which"
  need "${NODE_PACKAGES[@]}"
  network
  control_plane
  pause_image
  local n
  for n in $(seq "$NODES"); do node "$n"; done
  service_rules
  volumes
  until_ok "all $NODES nodes are Ready" 120 nodes_ready
  debian_status
}

nodes_ready() {
  api GET /api/v1/nodes | jq -e --argjson n "$NODES" \
    '[.items[].status.conditions[] | select(.type == "Ready" and .status == "True")] | length >= $n'
}

debian_status() {
  { pid_of apiserver && api_ready; } >/dev/null 2>&1 || die "not running"
  echo "KUBECONFIG=$KUBECONFIG"
}

debian_load() {
  local n nodes=()
  [ $# = 2 ] || die "usage: cluster.sh load ARCHIVE REF"
  # images.sh writes an archive anew under its name
  exec 8>"$CACHE/images.lock"
  flock -s 8
  for n in $(seq "$NODES"); do
    import "$n" "$1" "$2" &
    nodes+=($!)
  done
  for n in "${nodes[@]}"; do wait "$n"; done
}

debian_lose() {
  [ -d "$DIR/node-${1:-none}" ] || die "no node named ${1:-(none given)}: they are numbered from 1 to $NODES"
  node_lost "$1" "${2:-}"
  say "node-$1 is silent$([ -z "${2:-}" ] || echo ' and its containers are dead'); cluster.sh up brings it back"
}

debian_down() {
  [ -d "$DIR" ] || { say "nothing runs in $DIR" && return; }
  local node mount folder
  if [ -z "$CONTROL_PLANE_ONLY" ]; then
    discard volumes proxy
    for node in "$DIR"/node-*/; do
      [ -d "$node" ] && node=${node%/} && node_down "${node##*-}"
    done
  fi
  discard dns scheduler controller-manager apiserver etcd
  if [ -z "$CONTROL_PLANE_ONLY" ]; then
    awk -v dir="$DIR/" 'index($2, dir) == 1 {print $2}' /proc/mounts | sort -r | while read -r mount; do umount -l "$mount" || true; done
    network_down
    for folder in /sys/fs/cgroup/*/ddp /sys/fs/cgroup/ddp; do
      [ ! -d "$folder" ] || find "$folder" -depth -type d -exec rmdir {} + 2>/dev/null || true
    done
  fi
  rm -rf "$DIR"
}

# The container that holds a pod's network open: a static program that sleeps and reaps. Built, because nothing can be pulled.
pause_image() {
  [ -f "$CACHE/pause.tar" ] && return
  need gcc libc6-dev
  local work
  work=$(mktemp -d)
  gcc -static -Os -o "$work/pause" "$HERE/lib/pause.c"
  tar -C "$work" --owner=0 --group=0 -cf "$work/layer.tar" pause
  jq -n --arg layer "sha256:$(sha256sum "$work/layer.tar" | cut -d' ' -f1)" --arg arch "$(dpkg --print-architecture)" \
    '{os: "linux", architecture: $arch, config: {Entrypoint: ["/pause"]}, rootfs: {type: "layers", diff_ids: [$layer]}}' >"$work/config.json"
  echo '[{"Config": "config.json", "RepoTags": ["localhost/pause:3"], "Layers": ["layer.tar"]}]' >"$work/manifest.json"
  tar -C "$work" -cf "$CACHE/.pause.tar" manifest.json config.json layer.tar
  mv "$CACHE/.pause.tar" "$CACHE/pause.tar"
  rm -rf "$work"
}
