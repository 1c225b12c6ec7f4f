#!/usr/bin/env bash
# Make the CUDA environment: a virtual environment with the pinned packages and the project.
#
# Called by `make setup-cuda`, which passes:
#   PYTHON   interpreter that makes the environment, 3.12
#   VENV     where it goes
#   WHEELS   folder that tools/cuda_wheels.sh made: nothing is fetched; empty: pip's own index
#
# Needs no GPU and no CUDA toolkit: the CUDA libraries come with torch's wheels. At run time the
# machine needs NVIDIA's driver (580 or newer for CUDA 13) and a C compiler for Triton's launcher.
# Ends with the time it took and the size of the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.12}
venv=${VENV:-.venv}
wheels=${WHEELS:-}
constraints=constraints/gpu-py312.txt

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say() { printf 'setup-cuda: %s\n' "$*"; }

# step WHAT COMMAND...: run the command quietly, say how long it took, show its output if it fails.
step() {
    local what=$1 began=$SECONDS
    shift
    say "$what ..."
    if ! "$@" >"$scratch/log" 2>&1; then
        tail -n 40 "$scratch/log" >&2
        say "failed after $((SECONDS - began)) s: $what" >&2
        return 1
    fi
    say "$what: $((SECONDS - began)) s"
}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
if [ "$version" != 3.12 ]; then
    state=${version:+is $version}
    say "the pins are for Python 3.12; $python ${state:-cannot be run}" >&2
    say "name an interpreter of that version: make setup-cuda CUDA_PYTHON=python3.12" >&2
    exit 1
fi

# An environment whose making broke off has a python and no pip; making it again mends it.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    step "virtual environment $venv" "$python" -m venv "$venv"
fi
if [ "$("$venv/bin/python" -c 'import sys; print(sys.version_info[1])')" != 12 ]; then
    say "$venv is an environment of another Python (the CPU one?): make setup-cuda VENV=.venv-cuda" >&2
    exit 1
fi
source=()
if [ -n "$wheels" ]; then
    source=(--no-index --find-links "$wheels")
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

step "setuptools" pip install "${source[@]}" -c "$constraints" "setuptools>=77"
step "pinned packages (10 to 20 minutes)" pip install "${source[@]}" -c "$constraints" \
    --no-build-isolation -e ".[cuda,dev]"
step "pip check" pip check
say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s, $(du -sh "$venv" | cut -f1) in $venv"
