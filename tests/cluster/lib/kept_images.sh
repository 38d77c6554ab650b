# shellcheck shell=bash
# The images of a node outlive its cluster, in the cache: to unpack them anew takes a processor a minute. Sourced by debian.sh.

readonly KEPT=$CACHE/node-images
# Of containerd's root: the blobs, the unpacked layers, and what of them is which image.
readonly STORES=(io.containerd.content.v1.content io.containerd.snapshotter.v1.overlayfs io.containerd.metadata.v1.bolt)

# with_kept_images NODE_DIR: a new node begins with them. Blobs and layers are never written to, so all nodes link to the same
# files; each has databases of its own. Where the cache is on another file system, all of it is loaded anew.
with_kept_images() {
  [ ! -e "$1/containerd/${STORES[0]}" ] || return 0
  (
    flock -s 8
    rm -rf "$1/kept"
    [ -d "$KEPT" ] && cp -al "$KEPT" "$1/kept" 2>/dev/null && own_databases "$1/kept" || exit 0
    # in place as a whole, or not at all: a containerd on a part of them would write to the databases of all nodes
    if rmdir "$1"/{containerd,images}; then mv "$1/kept/containerd" "$1/kept/images" "$1"; fi
  ) 8>"$KEPT.lock"
  rm -rf "$1/kept"
  mkdir -p "$1"/{containerd,images}
}

# own_databases FOLDER: in place of links to those of others.
own_databases() {
  local database
  while read -r database; do
    cp "$database" "$database.own" && mv "$database.own" "$database" || return
  done < <(find "$1" -name '*.db')
}

# only_images N: no containers, whose records stay where their processes are gone, and no image that has lost its name to another.
only_images() {
  local ctr=(timeout 60 ctr -a "$DIR/node-$1/containerd.sock" -n k8s.io) containers unnamed
  containers=$("${ctr[@]}" containers ls -q 2>/dev/null) || return
  # an image has a second name, its digest, which it keeps
  unnamed=$("${ctr[@]}" images ls | awk '$1 !~ /^sha256:/ {named[$3]} $1 ~ /^sha256:/ {found[$1] = $3}
    END {for (image in found) if (!(found[image] in named)) print image}') || return
  # shellcheck disable=SC2086  # one word each
  { [ -z "$containers" ] || "${ctr[@]}" containers rm $containers; } && { [ -z "$unnamed" ] || "${ctr[@]}" images rm $unnamed; } >/dev/null
}

# keep_images N: of a node whose containerd has ended, with `only_images`.
keep_images() {
  local dir=$DIR/node-$1
  [ "$(stat -c %d "$dir")" = "$(stat -c %d "$CACHE")" ] || return 0
  (
    flock 8
    rm -rf "$KEPT.new"
    mkdir -p "$KEPT.new/containerd"
    mv "${STORES[@]/#/$dir/containerd/}" "$KEPT.new/containerd" && mv "$dir/images" "$KEPT.new" || exit 0
    rm -rf "$KEPT"
    mv "$KEPT.new" "$KEPT"
  ) 8>"$KEPT.lock"
}
