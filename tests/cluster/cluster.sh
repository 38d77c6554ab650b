#!/usr/bin/env bash
# The Kubernetes cluster that the cluster tests and `make demo-cluster` run on.
#
#   cluster.sh up [--control-plane-only] [--until-end-of PID]
#                                          start it, or find it running; what is started here may end with a process
#   cluster.sh load ARCHIVE REF            put an image (docker or OCI archive, OCI layout) on every node, as REF
#   cluster.sh lose N [--power]            node N falls silent: its containers run on, or (--power) die with it; `up` brings it back
#   cluster.sh status                      exit code 0 while the API server answers
#   cluster.sh down                        stop and remove all that `up` started (both take --control-plane-only too); the images
#                                          of a node stay in the cache
#   cluster.sh need PACKAGE…               install Debian packages that the tests themselves run
#   cluster.sh choose                      name the cluster that would be used
#
# Used, in this order: the one that $DDPJOB_TEST_KUBECONFIG names; kind, where Docker and kind are there and
# $DDPJOB_KUBERNETES_BIN is not set; two nodes of this host (root, Debian 12). Exit code 3: none is possible here, and the line on
# stderr says why.
#
# Nodes of this host run Kubernetes 1.20, built from Debian's own source package, or the programs in the folder that
# $DDPJOB_KUBERNETES_BIN names: kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and perhaps kube-proxy, of
# 1.20 or newer. What is up has one version; `down` comes before another.
#
# --control-plane-only is etcd, API server and controller manager: no nodes, no root once built, and independent of the
# full cluster, so that no kubelet and no scheduler touches what an API test creates. It listens on 127.0.0.1, on
# $DDPJOB_CLUSTER_PORT (26443) and the two ports after it.
#
# Chatter goes to stderr. `up` and `status` print one line on stdout: KUBECONFIG=<path>.
set -euo pipefail
# bash itself goes on after a Ctrl-C that the command in the foreground ends from in its own way
trap 'exit 130' INT

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
CONTROL_PLANE_ONLY=
case " $* " in *" --control-plane-only "*) CONTROL_PLANE_ONLY=yes ;; esac

# shellcheck source=lib/settings.sh
. "$HERE/lib/settings.sh"
# shellcheck source=lib/processes.sh
. "$HERE/lib/processes.sh"
# shellcheck source=lib/debian.sh
. "$HERE/lib/debian.sh"
# shellcheck source=lib/kind.sh
. "$HERE/lib/kind.sh"
trap remove_our_policy EXIT

# Prints given, kind or debian.
choose() {
  if [ -n "${DDPJOB_TEST_KUBECONFIG:-}" ] && [ "$DDPJOB_TEST_KUBECONFIG" != "$KUBECONFIG" ]; then
    [ -r "$DDPJOB_TEST_KUBECONFIG" ] || die "DDPJOB_TEST_KUBECONFIG names $DDPJOB_TEST_KUBECONFIG, which cannot be read"
    echo given
  elif [ -z "$GIVEN" ] && command -v kind >/dev/null && docker info >/dev/null 2>&1; then
    echo kind
  else
    debian_possible && echo debian
  fi
}

# The cluster of a user's own: nothing of it is ours to start, stop or fill.
given_up() { say "cluster: yours, named by DDPJOB_TEST_KUBECONFIG" && given_status; }
given_status() { echo "KUBECONFIG=$DDPJOB_TEST_KUBECONFIG"; }
given_down() { say "DDPJOB_TEST_KUBECONFIG names a cluster that this script did not start; left as it is"; }
given_load() { die "push $2 to a registry that your cluster pulls from: this script only loads images into clusters it started" 3; }
given_lose() { die "this script only takes nodes away from clusters it started" 3; }

# Not even SIGKILL of a test session leaves a cluster behind that was not there before.
end_with() {
  is_running "$1" "$(started_at "$1")" || die "there is no process $1"
  mkdir -p "$DIR"/{logs,run}
  start end-with "$HERE/lib/end_with.sh" "$DIR" "$1" "$HERE/cluster.sh" ${CONTROL_PLANE_ONLY:+--control-plane-only}
}

# `down` may be what that daemon has become.
stop_end_with() { [ "$(pid_of end-with)" = $$ ] || stop end-with; }

main() {
  local command=${1:-help} cluster owner=""
  case $command in
    up | down | status | load | lose) ;;
    choose) choose && return ;;
    need) shift && need "$@" && return ;;
    *) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//p}' "$0" && exit 2 ;;
  esac
  shift
  cluster=$(choose)
  if [ "$command" != status ]; then only_one_at_a_time; fi
  if [ "$command" = up ] && [[ " $*" =~ \ --until-end-of\ ([0-9]+) ]]; then owner=${BASH_REMATCH[1]}; fi
  if [ -n "$owner" ] && ! ("${cluster}_status") >/dev/null 2>&1; then end_with "$owner"; fi
  if [ "$command" = down ] && [ -d "$DIR" ]; then stop_end_with; fi
  "${cluster}_$command" "$@"
}

main "$@"
