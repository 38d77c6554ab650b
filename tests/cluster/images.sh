#!/usr/bin/env bash
# Builds the operator's and the trainer's image with docker, podman or buildah, whichever is there, and keeps each in a file (docker,
# podman: an archive) or a folder (buildah: an OCI layout).
#
#   images.sh [operator] [trainer]     both, unless named; prints a line "REF ARCHIVE" for each
#
# TORCH=cpu|cuda   which torch the trainer gets (cpu)
# TORCH_INDEX_URL=… where the CPU build of torch comes from, such as PyTorch's own index, if its wheel is not in one of
#                  pip's find-links folders
# BASE_IMAGE=…     what both build on (python:3.12-slim; with buildah, which works without a registry, a Debian 12 made by
#                  debootstrap and cached)
# pip inside the build gets the settings that pip has here (pip config list, PIP_*), and the wheels of its find-links folders.
set -euo pipefail
CONTROL_PLANE_ONLY=
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/settings.sh
. "$HERE/lib/settings.sh"
# shellcheck source=lib/packages.sh
. "$HERE/lib/packages.sh"
# shellcheck source=lib/base_image.sh
. "$HERE/lib/base_image.sh"

ROOT=$(cd "$HERE/../.." && pwd)
TORCH=${TORCH:-cpu}
VERSION=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$ROOT/pyproject.toml")
REVISION=$(git -C "$ROOT" rev-parse --short HEAD 2>/dev/null || echo unknown)
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"; remove_our_policy' EXIT

tool() {
  if docker info >/dev/null 2>&1; then
    echo docker
  elif command -v podman >/dev/null; then
    echo podman
  else
    need buildah skopeo jq
    echo buildah
  fi
}

# The pip settings of this host, for pip in the build. Paths of this host mean nothing there: the certificate and the wheels are mounted,
# and an index that is a folder is left out.
pip_settings() {
  local python=python3 key value
  [ ! -x "$ROOT/.venv/bin/python" ] || python=$ROOT/.venv/bin/python
  mkdir -p "$WORK/wheels"
  : >"$WORK/ca.crt"
  echo "[global]" >"$WORK/pip.conf"
  "$python" -m pip config list 2>/dev/null | sed -n "s/^[a-z:]*[.:]*\.\([a-z-]*\)='\(.*\)'$/\1 \2/p" | while read -r key value; do
    case $key in
      cert) cp "$value" "$WORK/ca.crt" ;;
      find-links) find_wheels "$value" ;;
      index-url | extra-index-url | trusted-host | timeout | default-timeout | retries | proxy)
        value=$(tr ' ' '\n' <<<"$value" | grep -v '^file:' | paste -sd ' ') || true
        [ -z "$value" ] || echo "$key = $value" >>"$WORK/pip.conf"
        ;;
    esac
  done
  if [ -s "$WORK/ca.crt" ]; then echo "cert = /etc/ssl/pip-ca.crt" >>"$WORK/pip.conf"; fi
}

# The CPU build of torch is not on PyPI: pip would say so at the end of a long build.
torch_is_somewhere() {
  [ "$TORCH" != cpu ] || [ -n "${TORCH_INDEX_URL:-}" ] || compgen -G "$WORK/wheels/torch-*+cpu*.whl" >/dev/null ||
    grep -qE '^(extra-)?index-url = ' "$WORK/pip.conf" ||
    die "PyPI has no CPU build of torch: set TORCH_INDEX_URL to PyTorch's index of CPU builds, or TORCH=cuda" 2
}

find_wheels() {
  local folder
  for folder in $1; do
    [ ! -d "$folder" ] || find "$folder" -maxdepth 1 -name '*.whl' -exec cp -lf -t "$WORK/wheels" {} + 2>/dev/null ||
      find "$folder" -maxdepth 1 -name '*.whl' -exec cp -t "$WORK/wheels" {} +
  done
}

# build REF DOCKERFILE ARGUMENT…
build() {
  local ref=$1 file=$2 archive
  shift 2
  archive=$CACHE/images/$(tr '/:' '__' <<<"${ref#localhost/}")
  [ "$TOOL" = buildah ] || archive=$archive.tar
  local arguments=(--tag "$ref" --file "$ROOT/$file" --build-arg "VERSION=$VERSION" --build-arg "REVISION=$REVISION" "$@"
    --build-context "wheels=$WORK/wheels" --secret "id=pip,src=$WORK/pip.conf" --secret "id=ca,src=$WORK/ca.crt")
  [ -z "${BASE_IMAGE:-}" ] ||
    arguments+=(--build-arg "BASE_IMAGE=$BASE_IMAGE" --label "org.opencontainers.image.base.name=$BASE_IMAGE")
  say "building $ref with $TOOL"
  case $TOOL in
    # an attestation has the time of the build: each would be another image, in an index of its own, though all was cached
    docker) BUILDX_NO_DEFAULT_ATTESTATIONS=1 loudly_if_wrong docker build "${arguments[@]}" "$ROOT" ;;
    podman) loudly_if_wrong podman build --layers "${arguments[@]}" "$ROOT" ;;
    buildah) loudly_if_wrong buildah_here build --layers --network host "${arguments[@]}" "$ROOT" ;;
  esac
  archive "$ref" "$archive"
  echo "$ref $archive"
}

loudly_if_wrong() {
  "$@" >"$WORK/build.log" 2>&1 || { cat "$WORK/build.log" >&2 && die "the image does not build; its log is above"; }
}

# Written again only when the image changed, so that a node imports only what it lacks. buildah writes an OCI layout, a folder in
# which the layers that stayed the same are there already.
archive() {
  local ref=$1 archive=$2 id
  mkdir -p "${archive%/*}"
  if [ "$TOOL" = buildah ]; then
    layout "$ref" "$archive"
    return
  fi
  id=$("$TOOL" image inspect --format '{{.Id}}' "$ref")
  [ -f "$archive" ] && [ "$(cat "$archive.id" 2>/dev/null)" = "$id" ] && return
  rm -rf "$archive" "$archive.new"
  "$TOOL" save --output "$archive.new" "$ref"
  mv "$archive.new" "$archive"
  echo "$id" >"$archive.id"
}

layout() {
  local ref=$1 layout=$2 manifest blob
  [ -d "$layout" ] || rm -f "$layout"
  # one image a folder: without its index, the new one does not stand beside the old
  rm -f "$layout/index.json"
  # skopeo finds the layers that are there; buildah's push would write all of them anew
  skopeo --insecure-policy copy --quiet --dest-oci-accept-uncompressed-layers \
    "containers-storage:[overlay@$CACHE/storage+$CACHE/storage-run]$ref" "oci:$layout" >&2
  # containerd takes the name from an annotation of its own
  jq --arg ref "$ref" '.manifests[0].annotations["io.containerd.image.name"] = $ref' "$layout/index.json" >"$layout/.index.json"
  mv "$layout/.index.json" "$layout/index.json"
  manifest=$(jq -r '.manifests[0].digest' "$layout/index.json")
  for blob in "$layout"/blobs/sha256/*; do
    { echo "$manifest" && jq -r '.config.digest, .layers[].digest' "$layout/blobs/${manifest/://}"; } | grep -xF "sha256:${blob##*/}" >/dev/null || rm "$blob"
  done
}

main() {
  local what
  [ $# -gt 0 ] || set -- operator trainer
  mkdir -p "$CACHE"
  exec 8>"$CACHE/images.lock" && flock 8
  TOOL=$(tool)
  # what an interrupted build left
  [ "$TOOL" != buildah ] || buildah_here rm --all >/dev/null
  pip_settings
  [[ " $* " != *" trainer "* ]] || torch_is_somewhere
  if [ "$TOOL" = buildah ] && [ -z "${BASE_IMAGE:-}" ]; then
    base_image
    BASE_IMAGE=$DEBIAN_BASE
  fi
  for what in "$@"; do
    case $what in
      operator) build "localhost/ddpjob-operator:$VERSION" Dockerfile ;;
      trainer)
        build "localhost/ddpjob-trainer:$VERSION-$TORCH" trainer_image/Dockerfile --build-arg "TORCH=$TORCH" --build-arg "TORCH_INDEX_URL=${TORCH_INDEX_URL:-}"
        ;;
      *) die "there is no image $what: operator or trainer" 2 ;;
    esac
  done
}

main "$@"
