#!/usr/bin/env bash
# Collect everything that `make setup-cuda` installs, for a machine without a network.
#
#   tools/cuda_wheels.sh wheels        on a machine with a network, Linux on x86-64, any Python 3.10+
#   make setup-cuda WHEELS=wheels      on the other, in the same checkout with the folder copied over
#
# No GPU is needed for the first. The folder also takes the data: a model is a Hugging Face folder,
# named by model.path, and GSM8K its parquet files, named by data.source.
set -euo pipefail
out=${1:?usage: tools/cuda_wheels.sh FOLDER}
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
mkdir -p "$out"
platforms=()
for tag in $(seq -f 2_%g 39 -1 5); do
    platforms+=(--platform "manylinux_${tag}_x86_64")
done
for tag in manylinux2014 manylinux2010 manylinux1 linux; do
    platforms+=(--platform "${tag}_x86_64")
done
# Every version is pinned there, so nothing is resolved: what the list has is what is fetched.
"$python" -m pip download --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp "${platforms[@]}" -d "$out" \
    -r constraints/gpu-py312.txt
printf 'cuda-wheels: %s wheels, %s in %s\n' "$(ls "$out" | wc -l)" "$(du -sh "$out" | cut -f1)" "$out"
