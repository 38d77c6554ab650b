# shellcheck shell=bash
# etcd, API server, controller manager, scheduler. Sourced by debian.sh.

control_plane() {
  keys
  start etcd etcd --data-dir "$DIR/etcd" --unsafe-no-fsync --log-level warn \
    --listen-client-urls "http://127.0.0.1:$ETCD_PORT" --advertise-client-urls "http://127.0.0.1:$ETCD_PORT" \
    --listen-peer-urls "http://127.0.0.1:$ETCD_PEER_PORT" --initial-advertise-peer-urls "http://127.0.0.1:$ETCD_PEER_PORT" \
    --initial-cluster "default=http://127.0.0.1:$ETCD_PEER_PORT"
  until_ok "etcd answers" 60 curl -fs --max-time 5 "http://127.0.0.1:$ETCD_PORT/health"
  # No compaction: a test replays the whole history of an object from etcd. The audit log says who asked for what.
  # Priority and fairness keeps statistics of its queues all the time, with and without requests.
  start apiserver "$(program kube-apiserver)" --etcd-servers "http://127.0.0.1:$ETCD_PORT" --etcd-compaction-interval 0 \
    --bind-address "$HOST" --advertise-address "$ADVERTISE" --secure-port "$API_PORT" --cert-dir "$DIR/pki/apiserver" \
    --service-cluster-ip-range "$SERVICES" --token-auth-file "$DIR/pki/tokens.csv" --authorization-mode RBAC --allow-privileged \
    --service-account-key-file "$DIR/pki/sa.pub" --service-account-signing-key-file "$DIR/pki/sa.key" \
    --service-account-issuer https://kubernetes.default.svc --kubelet-preferred-address-types InternalIP \
    --audit-policy-file "$DIR/audit.yaml" --audit-log-path "$DIR/audit.log" --enable-priority-and-fairness=false
  until_ok "the API server is ready" 120 api_ready
  kubeconfig
  local ports
  mapfile -t ports < <(no_ports kube-controller-manager)
  # Without nodes, every pod that a test binds to one would be deleted as orphaned after 40 s, and every claim would get an
  # event every 15 s that there is no volume. Nothing asks for endpoints, which are a third of all writes, and no container
  # reads the certificate that each new namespace gets.
  local controllers='*'
  [ -z "$CONTROL_PLANE_ONLY" ] ||
    controllers='*,-podgc,-persistentvolume-binder,-endpoint,-endpointslice,-endpointslicemirroring,-root-ca-cert-publisher'
  # Node deadlines are short, so that a test loses a node in seconds. By default Kubernetes waits 40 s, since 1.32 50 s.
  start controller-manager "$(program kube-controller-manager)" --kubeconfig "$KUBECONFIG" --leader-elect=false "${ports[@]}" \
    --controllers "$controllers" --service-account-private-key-file "$DIR/pki/sa.key" --root-ca-file "$DIR/pki/apiserver/apiserver.crt" \
    --node-monitor-period 2s --node-monitor-grace-period "${DDPJOB_NODE_GRACE:-12s}" --kube-api-qps 200 --kube-api-burst 400
  if [ -z "$CONTROL_PLANE_ONLY" ]; then
    mapfile -t ports < <(no_ports kube-scheduler)
    start scheduler "$(program kube-scheduler)" --kubeconfig "$KUBECONFIG" --leader-elect=false "${ports[@]}"
  fi
  # Pods are refused until the controller manager has made their service account.
  until_ok "the default service account exists" 60 api GET /api/v1/namespaces/default/serviceaccounts/default
}

keys() {
  [ -f "$DIR/audit.yaml" ] ||
    printf 'apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Metadata}]\n' >"$DIR/audit.yaml"
  certificate
  [ -s "$DIR/pki/tokens.csv" ] && [ -s "$DIR/pki/sa.pub" ] && return
  (umask 077 && openssl ecparam -name prime256v1 -genkey -noout -out "$DIR/pki/sa.key" &&
    echo "$(openssl rand -hex 16),admin,admin,system:masters" >"$DIR/pki/tokens.csv") 2>/dev/null
  openssl ec -in "$DIR/pki/sa.key" -pubout -out "$DIR/pki/sa.pub" 2>/dev/null
}

# The API server would make one itself, with an RSA key: each connection would cost it milliseconds of a processor, more
# than all else in the tests.
certificate() {
  local into=$DIR/pki/apiserver
  [ -s "$into/apiserver.crt" ] && return
  mkdir -p "$into"
  (umask 077 && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=apiserver \
    -addext "subjectAltName=DNS:localhost,DNS:kubernetes.default.svc,IP:$HOST,IP:$ADVERTISE,IP:${SERVICES%.0/*}.1" \
    -keyout "$into/apiserver.key" -out "$into/new.crt") 2>/dev/null
  mv "$into/new.crt" "$into/apiserver.crt"
}

kubeconfig() {
  [ -s "$KUBECONFIG" ] && return
  (umask 077 && cat >"$KUBECONFIG.new") <<YAML
apiVersion: v1
kind: Config
clusters: [{name: ddp, cluster: {server: "$API", certificate-authority-data: $(base64 -w0 "$DIR/pki/apiserver/apiserver.crt")}}]
users: [{name: admin, user: {token: "$(cut -d, -f1 "$DIR/pki/tokens.csv")"}}]
contexts: [{name: ddp, context: {cluster: ddp, user: admin}}]
current-context: ddp
YAML
  mv "$KUBECONFIG.new" "$KUBECONFIG"
}

# api METHOD PATH: a request as administrator, its JSON body from standard input where the method has one.
api() {
  local body=()
  case $1 in POST | PUT | PATCH) body=(--data-binary @-) ;; esac
  # the token stays out of the process list
  curl -fsS --max-time 15 --cacert "$DIR/pki/apiserver/apiserver.crt" -X "$1" -H 'Content-Type: application/json' \
    -H @<(echo "Authorization: Bearer $(cut -d, -f1 "$DIR/pki/tokens.csv")") "${body[@]}" "$API$2"
}

api_ready() { [ "$(api GET /readyz)" = ok ]; }
