#!/usr/bin/env bash
# Writes tools/pins: the exact version of every package, for each TensorFlow and Python, from the ranges in
# pyproject.toml.
#
#   tools/pin.sh 2.15 python3.9 python3.10 python3.11
#   tools/pin.sh 2.21 python3.10 python3.11 python3.12 python3.13
#
# The only place that resolves dependencies: set-up itself installs what is written there. Look at the difference, then
# run `make test-all` and `make test-versions` before committing it.
set -euo pipefail

# Horovod and its build tools. pip 25.3 and wheel 0.46 lost functions that its setup.py calls.
readonly BUILD=('horovod==0.28.1' 'cmake>=3.13,<4' 'setuptools>=65,<70' 'wheel<0.46' 'pip<25.3')
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
release=${1:?the TensorFlow, such as 2.21, then the Pythons}
pins=$root/tools/pins/tensorflow$release
shift
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# What the extra `datasets` says of a Python goes for the oldest TensorFlow that it has.
datasets=(tensorflow-datasets'>=4.9,<4.10' 'tensorflow-metadata>=1.21')
[ "$release" != 2.15 ] || datasets=(tensorflow-datasets'>=4.9,<4.10' 'tensorflow-metadata<1.18')
# NVRTC and its headers are of the CUDA that TensorFlow was built with.
newer=12.6
[ "$release" != 2.15 ] || newer=12.3
constraints=("nvidia-cuda-nvrtc-cu12<$newer" "nvidia-cuda-runtime-cu12<$newer")
printf '%s\n' "tensorflow==$release.*" "${constraints[@]}" >"$scratch/constraints"

resolve() {  # requirements -> sorted name==version lines
    "$scratch/venv/bin/python" -m pip install --quiet --dry-run --no-build-isolation -c "$scratch/constraints" \
        --ignore-installed --report "$scratch/report.json" "$@"
    "$scratch/venv/bin/python" -c '
import json, sys
found = [item["metadata"] for item in json.load(open(sys.argv[1]))["install"]]
for name, version in sorted((m["name"].lower().replace("_", "-").replace(".", "-"), m["version"]) for m in found):
    if name != "collective-strategy":
        print(name + "==" + version)' "$scratch/report.json"
}

mkdir -p "$pins"
first=''
for python; do
    "$python" -m venv --clear "$scratch/venv"
    # An older pip resolves these requirements in hours, a newer one at once. Metadata are made without build isolation,
    # which would install TensorFlow for each.
    "$scratch/venv/bin/python" -m pip install --quiet --upgrade pip 'setuptools>=65,<70' 'wheel<0.46'
    version=$("$scratch/venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    resolve "$root[data,recommenders,serve,tensorboard,test]" "${datasets[@]}" "${BUILD[@]}" >"$scratch/pins"
    cat - "$scratch/pins" >"$pins/python$version.txt" <<EOF
# TensorFlow $release on Python $version, by tools/pin.sh: collective-strategy[data,recommenders,serve,tensorboard,test], Horovod
# and what builds it, tensorflow-datasets.
EOF
    echo "TensorFlow $release, Python $version: $(wc -l <"$scratch/pins") packages"
    resolve "$root[gpu]" 'tensorflow[and-cuda]' -c "$scratch/pins" | grep -vxFf "$scratch/pins" >"$scratch/gpu$version"
    if [ -z "$first" ]; then
        cp "$scratch/gpu$version" "$scratch/gpu"
        first=$version
    elif ! cmp -s "$scratch/gpu" "$scratch/gpu$version"; then
        diff "$scratch/gpu" "$scratch/gpu$version" || true
        echo "gpu.txt is Python $first's; Python $version resolves it as above" >&2
    fi
done
cat - "$scratch/gpu" >"$pins/gpu.txt" <<EOF
# Every Python, by tools/pin.sh: what GPU=1 adds, i.e. tensorflow[and-cuda] and collective-strategy[gpu].
EOF
