#!/usr/bin/env bash
# Writes dist/<image>-<tag>.spdx.json for each image: the packages of its base and of Python, with their versions.
# TORCH=cpu|cuda chooses the trainer, as in images.sh, which builds what is not there yet.
#
# Usage: release/sbom.sh [FOLDER OF syft]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${1:-.venv/bin}
mkdir -p dist
built=$(tests/cluster/images.sh operator trainer)
while read -r reference archive; do
  # images.sh keeps an OCI layout where buildah built the image, else what `docker save` writes
  if [ -d "$archive" ]; then source=oci-dir:$archive; else source=docker-archive:$archive; fi
  name=${reference#localhost/}
  SYFT_CHECK_FOR_APP_UPDATE=false "$bin/syft" scan --quiet --source-name "${name%:*}" --source-version "${name#*:}" \
    --output "spdx-json=dist/${name/:/-}.spdx.json" "$source"
  echo "dist/${name/:/-}.spdx.json"
done <<<"$built"
