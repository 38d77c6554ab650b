# shellcheck shell=bash
# Kubernetes' servers, built once from Debian's source package. Sourced by debian.sh.
#
# Debian 12's binary packages hold kubectl alone, but its source package is the whole tree with vendored modules: it builds
# offline with Debian's own Go, in about five minutes on two cores. Debian 13's source package is cut down to kubectl.

readonly SERVERS=(kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy)
readonly BUILT_VERSION=1.20.2

built() {
  local server
  for server in "${SERVERS[@]}"; do [ -x "$BIN/$server" ] || return 1; done
}

build() {
  built && return
  need "${BUILD_PACKAGES[@]}"
  # the two clusters of a host have one cache
  mkdir -p "$CACHE"
  exec 6>"$CACHE/build.lock"
  flock 6
  built && exec 6>&- && return
  say "building Kubernetes $BUILT_VERSION from Debian's source package, once: five minutes on two cores"
  local source=$CACHE/src server
  rm -rf "$source" && mkdir -p "$source" "$BIN"
  fetch_source "$source"
  # The vendored reflect2 1.0.1 corrupts map iteration when built by Go 1.18 or later; Debian packages the mended 1.0.2.
  rm "$source"/tree/vendor/github.com/modern-go/reflect2/*.go
  cp /usr/share/gocode/src/github.com/modern-go/reflect2/*.go "$source/tree/vendor/github.com/modern-go/reflect2/"
  compile "$source/tree" >"$CACHE/build.log" 2>&1 || die "Kubernetes does not build: see $CACHE/build.log"
  # under its own name only when whole: an interrupted copy must not pass for a binary
  for server in "${SERVERS[@]}"; do
    install -m755 "$source/tree/_output/local/bin/linux/$(dpkg --print-architecture)/$server" "$BIN/.$server"
    mv "$BIN/.$server" "$BIN/$server"
  done
  rm -rf "$source"
  exec 6>&-
}

# Asks this host's own Debian archives, whichever they are, for source packages too.
fetch_source() {
  local source=$1 file
  mkdir -p "$source/lists/partial" "$source/parts"
  grep -lrs debian-archive-keyring /etc/apt/sources.list.d/ --include=*.sources | while read -r file; do
    sed 's/^Types:.*/Types: deb-src/' "$file" >"$source/parts/${file##*/}"
  done
  { grep -hs '^deb ' /etc/apt/sources.list /etc/apt/sources.list.d/*.list || true; } | sed 's/^deb /deb-src /' >"$source/parts/classic.list"
  local apt=(apt-get -oDir::Etc::sourcelist=/dev/null -oDir::Etc::sourceparts="$source/parts" -oDir::State::Lists="$source/lists"
    -oAPT::Sandbox::User=root)
  {
    "${apt[@]}" update -qq &&
      (cd "$source" && "${apt[@]}" source -qq --download-only kubernetes &&
        dpkg-source -x --no-check ./*.dsc tree)
  } >"$CACHE/source.log" 2>&1 || die "Debian's source package of Kubernetes cannot be fetched: see $CACHE/source.log" 3
}

compile() {
  local tree=$1
  (cd "$tree" && mkdir -p .go/src/k8s.io home && ln -sfn ../../.. .go/src/k8s.io/kubernetes &&
    env HOME="$tree/home" GOPATH="$tree/.go" CGO_ENABLED=0 GOFLAGS=-mod=vendor KUBE_GIT_TREE_STATE=clean \
      KUBE_GIT_VERSION=v$BUILT_VERSION KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20 KUBE_GIT_COMMIT=0000000000000000000000000000000000000000 \
      make WHAT="$(printf 'cmd/%s ' "${SERVERS[@]}")")
}
