#!/usr/bin/env bash
# The daemon behind lib/volumes.sh: replace_volumes.sh STATE_DIR
set -uo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DDPJOB_CLUSTER_DIR=$1 CONTROL_PLANE_ONLY=
# shellcheck source=settings.sh
. "$HERE/lib/settings.sh"
# shellcheck source=control_plane.sh
. "$HERE/lib/control_plane.sh"
# shellcheck source=volumes.sh
. "$HERE/lib/volumes.sh"
# curl, jq and the loop that reads them are children: they go when this goes
trap 'kill 0' TERM
replace_volumes
