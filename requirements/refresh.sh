#!/usr/bin/env bash
# Makes the lock files anew from pyproject.toml, with the newest versions that its bounds allow:
#
#   dev.txt       all that development and CI need, torch excepted
#   scan.txt      what `make scan` needs, in an environment of its own
#   libraries.txt what the tests of scripts on other libraries need besides: to be installed with --no-deps
#   operator.txt  the operator's image
#   trainer.txt   the trainer's image, torch excepted, with what torch needs on any machine
#   torch.txt     which torch all of them go with; no hash, because every index has builds of its own
#   torch-cpu.txt, torch-cuda.txt  that torch alone, and with all that its CUDA build and the extra named gpu need: to be installed
#                                  with --no-deps
#
# Each is valid for every version of Python that docs/support.md names: packages that only some need have a marker.
#
# Usage: requirements/refresh.sh [FOLDER OF pip AND uv]. It asks whatever index pip is set up to ask, and keeps no trace of which
# that was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly TORCH=2.13.0 OLDEST_PYTHON=3.11
bin=${1:-.venv/bin}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if index=$("$bin/pip" config get global.index-url 2>/dev/null); then export UV_DEFAULT_INDEX=$index; fi

# lock NAME ARGUMENT…: a lock file in $work
lock() {
  local name=$1
  shift
  echo "requirements: $name" >&2
  "$bin/uv" pip compile --quiet --universal --python-version $OLDEST_PYTHON --fork-strategy fewest --generate-hashes --no-header \
    --no-annotate --output-file "$work/$name" "$@" >/dev/null
}

publish() {
  { echo "# Made by requirements/refresh.sh: do not edit." && cat "$work/$1"; } >"requirements/$1"
}

# The blocks of a lock file (a line and its indented hashes) whose package name matches.
blocks() { awk -v name="$1" '/^[^ ]/ {keep = $1 ~ name} keep' "$2"; }

versions() { grep -oE '^[a-z0-9][^ ]*' "$1"; }

echo "torch==$TORCH" >"$work/torch.txt"
# the one with CUDA, which tells what only that one needs
lock all.txt --extra gpu "$work/torch.txt" pyproject.toml
# === leaves out builds such as 2.13.0+cpu
blocks '^(torch=|nvidia-|cuda-|triton)' "$work/all.txt" | sed 's/^torch==/torch===/' >"$work/torch-cuda.txt"
if "$bin/pip" download -q --no-deps --dest "$work" "torch==$TORCH+cpu" 2>"$work/log"; then
  for wheel in "$work"/torch-*.whl; do
    printf '%s \\\n' "torch==$TORCH+cpu"
    "$bin/pip" hash "$wheel" | sed -n 's/^--hash/    --hash/p'
  done >"$work/torch-cpu.txt"
else
  echo "requirements: there is no torch==$TORCH+cpu here; torch-cpu.txt stays as it is" >&2
  sed 1d requirements/torch-cpu.txt >"$work/torch-cpu.txt"
fi

omit=()
for package in $(versions "$work/torch-cuda.txt"); do omit+=(--no-emit-package "${package%%==*}"); done
cp "$work/torch.txt" "$work/same.in"
lock dev.txt --extra dev "${omit[@]}" --constraint "$work/same.in" pyproject.toml
# one version of a package everywhere
versions "$work/dev.txt" >>"$work/same.in"
lock trainer.txt --extra trainer --extra data "${omit[@]}" --constraint "$work/same.in" pyproject.toml
lock scan.txt --group scan
others=("${omit[@]}")
for package in $(versions "$work/dev.txt"); do others+=(--no-emit-package "${package%%==*}"); done
lock libraries.txt "${others[@]}" --constraint "$work/same.in" --group libraries
lock operator.txt --extra operator --constraint "$work/same.in" pyproject.toml

for name in dev.txt libraries.txt scan.txt operator.txt trainer.txt torch.txt torch-cpu.txt torch-cuda.txt; do publish $name; done
