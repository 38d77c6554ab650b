# shellcheck shell=bash
# Debian packages: what the cluster runs with, and what it is built with once. Sourced by debian.sh and images.sh.
# shellcheck disable=SC2034  # read by the files that source this one

readonly CONTROL_PLANE_PACKAGES=(etcd-server openssl curl jq)
readonly NODE_PACKAGES=(containerd runc containernetworking-plugins iproute2 iptables conntrack socat ethtool dnsmasq-base procps)
readonly BUILD_PACKAGES=(golang-go golang-github-modern-go-reflect2-dev dpkg-dev make gcc libc6-dev rsync jq)

installed() { dpkg-query -W -f '${Status}\n' "$@" 2>/dev/null | grep -c '^install ok installed' | grep -qx "$#"; }

# The file that keeps apt from starting services, while it is there because of us. Scripts remove it when they exit.
OUR_POLICY=
remove_our_policy() {
  [ -z "$OUR_POLICY" ] || rm -f "$OUR_POLICY"
  OUR_POLICY=
}

# need PACKAGE…: installs what is missing, without starting any service that a package brings along.
need() {
  installed "$@" && return
  [ "$(id -u)" = 0 ] || die "these Debian packages are needed, and only root can install them: $*" 3
  # the other cluster of this host may be at it, and both would put a policy there
  mkdir -p "$CACHE"
  exec 7>"$CACHE/apt.lock"
  flock 7
  say "installing Debian packages: $*"
  local policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    OUR_POLICY=$policy
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
  fi
  # apt by itself gives up at once while another apt is at work
  local apt=(apt-get -qq -o DPkg::Lock::Timeout=600)
  if ! { "${apt[@]}" update && DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends "$@"; } >"$CACHE/apt.log" 2>&1; then
    die "apt-get cannot install $*: see $CACHE/apt.log" 3
  fi
  remove_our_policy
  exec 7>&-
}
