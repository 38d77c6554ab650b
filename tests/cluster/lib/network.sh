# shellcheck shell=bash
# The bridge that pods hang on, the resolver they ask, and the rules of Services. Sourced by debian.sh.

network() {
  bridge
  mkdir -p "$DIR/cni" "$DIR/hosts"
  cat >"$DIR/cni/10-ddp.conflist" <<JSON
{"cniVersion": "0.4.0", "name": "ddp", "plugins": [{"type": "bridge", "bridge": "$BRIDGE", "isGateway": true, "ipMasq": false,
 "hairpinMode": true, "ipam": {"type": "host-local", "dataDir": "$DIR/ipam", "routes": [{"dst": "0.0.0.0/0"}],
 "ranges": [[{"subnet": "$NET.0.0/16", "rangeStart": "$NET.1.1"}]]}}]}
JSON
  # It answers "no such name" at once: with no resolver, each of c10d's reverse look-ups stalls a rendezvous for ten seconds.
  # Records for headless Services are files in hosts/, read as they appear.
  start dns dnsmasq --keep-in-foreground --user=root --listen-address="$HOST" --bind-interfaces --no-resolv --no-hosts --bogus-priv \
    --local=/cluster.local/ --hostsdir="$DIR/hosts" --pid-file= --conf-file=/dev/null
}

bridge() {
  if ! ip link show "$BRIDGE" >/dev/null 2>&1; then
    [ -z "$(ip route show "$NET.0.0/16")" ] || die "this host already uses $NET.0.0/16: set DDPJOB_CLUSTER_NET to another prefix, such as 10.214" 3
    ! iptables -w -t nat -S KUBE-SERVICES >/dev/null 2>&1 || [ -f "$DIR/run/iptables" ] ||
      die "this host already is a Kubernetes node: set DDPJOB_TEST_KUBECONFIG to use its cluster" 3
    ip link add "$BRIDGE" type bridge
  fi
  touch "$DIR/run/iptables"
  ip addr replace "$HOST/16" dev "$BRIDGE"
  ip link set "$BRIDGE" up
  # Without bridge-nf the answer of a pod on the same bridge bypasses the Service's address translation.
  modprobe -a br_netfilter overlay nf_conntrack 2>/dev/null || true
  [ -e /proc/sys/net/bridge/bridge-nf-call-iptables ] || die "the kernel has no br_netfilter: Services cannot work" 3
  [ -f "$DIR/run/ip_forward" ] || cat /proc/sys/net/ipv4/ip_forward >"$DIR/run/ip_forward"
  sysctl -qw net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1
}

service_rules() {
  local gates
  mapfile -t gates < <(endpoints)
  start proxy "$(program kube-proxy)" --kubeconfig "$KUBECONFIG" --hostname-override node-1 --proxy-mode iptables \
    --cluster-cidr "$NET.0.0/16" --conntrack-max-per-core 0 --healthz-bind-address "" "${gates[@]}" --metrics-bind-address 127.0.0.1:10349
}

network_down() {
  if [ -f "$DIR/run/iptables" ]; then remove_rules iptables && remove_rules ip6tables; fi
  if [ -f "$DIR/run/ip_forward" ]; then cat "$DIR/run/ip_forward" >/proc/sys/net/ipv4/ip_forward; fi
  ip link del "$BRIDGE" 2>/dev/null || true
}

# Takes the KUBE-* chains away, and touches no other rule.
remove_rules() {
  command -v "$1" >/dev/null || return 0
  "$1-save" 2>/dev/null | awk '
    function finish() { if (table != "" && chains != "") printf "%s\n%s%s%sCOMMIT\n", table, jumps, flush, chains; jumps = flush = chains = "" }
    /^\*/ { table = $0 }
    /^:KUBE-/ { name = substr($1, 2); flush = flush "-F " name "\n"; chains = chains "-X " name "\n" }
    /^-A / && $2 !~ /^KUBE-/ && / -j KUBE-/ { sub(/^-A/, "-D"); jumps = jumps $0 "\n" }
    /^COMMIT/ { finish() }' | "$1-restore" --wait --noflush || say "some KUBE- rules of $1 are left"
}
