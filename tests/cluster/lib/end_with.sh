#!/usr/bin/env bash
# The daemon behind `up --until-end-of`: end_with.sh STATE_DIR PID CLUSTER_SH [--control-plane-only]
#
# It has the settings of that `up` in its environment.
set -euo pipefail
DIR=$1 owner=$2 script=$3
shift 3
# shellcheck source=processes.sh
. "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
since=$(started_at "$owner")
while is_running "$owner" "$since"; do sleep 1; done
# keeps this process id, by which `down` knows that it need not stop this
exec "$script" down "$@"
