#!/usr/bin/env bash
# Checks the Dockerfiles and what the chart renders, with all its options on, against checkov's rules, offline. What .checkov.yaml
# skips has its reason there. Exit code 1: a rule is broken.
#
# Usage: release/scan.sh [FOLDER OF python WITH helm-python-sdk] [FOLDER OF checkov]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${1:-.venv/bin} scan=${2:-build/scan/bin}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$bin/python" - "$work" <<'PYTHON'
import sys
from pathlib import Path

import helm_python as helm

values = {
    "replicaCount": 2,
    "tenancy": {"bounds": {"maxNodes": 2}},
    "metrics": {"authentication": True, "readers": [{"name": "prometheus", "namespace": "monitoring"}]},
}
with helm.Chart.load("charts/ddpjob-operator") as chart:
    files = chart.render(values, name="ddpjob-operator", namespace="ddpjob-system")
for name, text in files.items():
    if name.endswith(".yaml") and not name.endswith("/crd.yaml") and text.strip():
        (Path(sys.argv[1]) / name.replace("/", "-")).write_text(text)
PYTHON
cp Dockerfile "$work/operator.Dockerfile"
cp trainer_image/Dockerfile "$work/trainer.Dockerfile"
"$scan/checkov" --config-file .checkov.yaml --directory "$work"
