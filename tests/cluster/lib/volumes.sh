# shellcheck shell=bash
# A default StorageClass and a pool of ReadWriteMany volumes: folders of this host that both nodes see. Sourced by debian.sh.
#
# The in-tree host-path provisioner makes folders that only root can write, and ours are for pods that are not root. A volume
# whose claim is gone is never reused: its folder is deleted and a fresh one takes its place, so that no test sees another's files.

volumes() {
  local i
  api GET /apis/storage.k8s.io/v1/storageclasses/shared >/dev/null 2>&1 || storage_class | api POST /apis/storage.k8s.io/v1/storageclasses >/dev/null
  mkdir -p "$DIR/volumes"
  for ((i = $(api GET /api/v1/persistentvolumes | jq '.items | length'); i < ${VOLUMES:-16}; i++)); do new_volume; done
  start volumes "$HERE/lib/replace_volumes.sh" "$DIR"
}

storage_class() {
  jq -n '{apiVersion: "storage.k8s.io/v1", kind: "StorageClass", provisioner: "kubernetes.io/no-provisioner",
    metadata: {name: "shared", annotations: {"storageclass.kubernetes.io/is-default-class": "true"}}}'
}

new_volume() {
  local folder
  folder=$(mktemp -d "$DIR/volumes/XXXXXXXX") && chmod 1777 "$folder"
  volume "shared-$(basename "$folder" | tr '[:upper:]' '[:lower:]')" "$folder" | api POST /api/v1/persistentvolumes >/dev/null
}

volume() {
  jq -n --arg name "$1" --arg path "$2" '{apiVersion: "v1", kind: "PersistentVolume", metadata: {name: $name},
    spec: {storageClassName: "shared", capacity: {storage: "100Gi"}, accessModes: ["ReadWriteOnce", "ReadWriteMany"],
      persistentVolumeReclaimPolicy: "Retain", hostPath: {path: $path}}}'
}

# Blocks on a watch for volumes that lost their claim. The API server ends every watch after a while; then it is opened anew.
replace_volumes() {
  local name path
  while sleep 1; do
    api_watch /api/v1/persistentvolumes |
      jq --unbuffered -r 'select(.object.status.phase == "Released") | .object | "\(.metadata.name) \(.spec.hostPath.path)"' |
      while read -r name path; do
        case $path in "$DIR"/volumes/?*) ;; *) continue ;; esac
        api DELETE "/api/v1/persistentvolumes/$name" >/dev/null && new_volume
        rm -rf "$path"
      done
  done
}

api_watch() {
  curl -fsSN --cacert "$DIR/pki/apiserver/apiserver.crt" -H @<(echo "Authorization: Bearer $(cut -d, -f1 "$DIR/pki/tokens.csv")") \
    "$API$1?watch=true"
}
