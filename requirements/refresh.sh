#!/usr/bin/env bash
# Makes the lock files anew from pyproject.toml, with the newest versions that its bounds allow:
#
#   dev.txt       all that development and CI need, torch excepted
#   operator.txt  the operator's image
#   trainer.txt   the trainer's image, torch excepted, with what torch needs on any machine
#   torch.txt     torch alone, for CPU and for CUDA: install it with --no-deps, beside one of the others
#   cuda.txt      what the CUDA build of that torch needs besides
#
# Usage: requirements/refresh.sh [FOLDER OF pip AND pip-compile]. It asks whatever index pip is set up to ask, and keeps no
# trace of which that was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly TORCH=2.13.0
bin=${1:-.venv/bin}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# lock NAME ARGUMENT…: a lock file in $work, without pip-compile's words about what it was told to leave out and without ddpjob
# itself, which the extra named dev asks for.
lock() {
  local name=$1
  shift
  echo "requirements: $name" >&2
  "$bin/pip-compile" -q --generate-hashes --allow-unsafe --strip-extras --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
    --no-emit-trusted-host --output-file "$work/raw" "$@" 2>"$work/log" || { cat "$work/log" >&2 && exit 1; }
  sed '/^#/d; /^ddpjob/d; /^$/d' "$work/raw" >"$work/$name"
  rm "$work/raw"
}

publish() {
  { echo "# Made from pyproject.toml by requirements/refresh.sh: do not edit." && cat "$work/$1"; } >"requirements/$1"
}

# The blocks of a lock file (a line and its indented hashes) whose package name matches.
blocks() { awk -v name="$1" '/^[^ ]/ {keep = $1 ~ name} keep' "$2"; }

versions() { grep -oE '^[a-z0-9][^ ]*' "$1"; }

# === leaves out builds such as 2.13.0+cpu: this is the one with CUDA, and tells what only that one needs.
echo "torch===$TORCH" >"$work/torch.in"
lock all "$work/torch.in"
blocks '^(nvidia-|cuda-|triton)' "$work/all" >"$work/cuda.txt"
blocks '^torch=' "$work/all" | sed 's/^torch===/torch==/' >"$work/torch.txt"
if "$bin/pip" download -q --no-deps --dest "$work" "torch==$TORCH+cpu" 2>"$work/log"; then
  for wheel in "$work"/torch-*.whl; do
    sed -i '$s/$/ \\/' "$work/torch.txt"
    "$bin/pip" hash "$wheel" | sed -n 's/^--hash/    --hash/p' >>"$work/torch.txt"
  done
else
  echo "requirements: no torch==$TORCH+cpu here, so torch.txt is without its hash" >&2
fi

omit=(--unsafe-package torch)
for package in $(versions "$work/cuda.txt"); do omit+=(--unsafe-package "${package%%==*}"); done
omit+=(--no-allow-unsafe)
echo "torch==$TORCH" >"$work/same.in"
lock dev.txt --extra dev "${omit[@]}" --constraint "$work/same.in" pyproject.toml
# one version of a package everywhere
versions "$work/dev.txt" >>"$work/same.in"
lock trainer.txt --extra trainer "${omit[@]}" --constraint "$work/same.in" pyproject.toml
lock operator.txt --extra operator --constraint "$work/same.in" pyproject.toml

for name in dev.txt operator.txt trainer.txt torch.txt cuda.txt; do publish $name; done
