# shellcheck shell=bash
# A base image where no registry answers: Debian 12 with Python, by debootstrap. Sourced by images.sh.

readonly DEBIAN_BASE=localhost/ddpjob-base:bookworm

# Storage of its own beside the other caches: nothing of this host's container storage is touched.
buildah_here() { buildah --root "$CACHE/storage" --runroot "$CACHE/storage-run" --storage-driver overlay "$@"; }

base_image() {
  buildah_here inspect --type image "$DEBIAN_BASE" >/dev/null 2>&1 && return
  local container
  [ -f "$CACHE/base.tar" ] || bootstrap
  container=$(buildah_here from scratch)
  buildah_here add --quiet "$container" "$CACHE/base.tar" / >/dev/null
  buildah_here config --cmd python3 "$container"
  buildah_here commit --quiet --rm "$container" "$DEBIAN_BASE" >/dev/null
}

bootstrap() {
  [ "$(id -u)" = 0 ] || die "debootstrap makes the base image, and needs root: run as root, or set BASE_IMAGE to an image that is here" 3
  command -v debootstrap >/dev/null || need debootstrap
  say "making a base image with debootstrap, once"
  local root=$CACHE/base archive
  rm -rf "$root"
  # the archive that this host itself installs from
  # shellcheck disable=SC2016  # apt expands these
  archive=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' 'Component: main' | head -1)
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" ${archive:+"$archive"} >"$CACHE/debootstrap.log" 2>&1 ||
    die "debootstrap failed: see $CACHE/debootstrap.log"
  rm -rf "${root:?}"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale,info}/* "$root"/var/log/* "${root:?}"/dev/*
  tar -C "$root" --numeric-owner -cf "$CACHE/.base.tar" .
  mv "$CACHE/.base.tar" "$CACHE/base.tar"
  rm -rf "$root"
}
