#!/usr/bin/env bash
# Writes tools/pins: the exact version of every package, for each Python, from the ranges in pyproject.toml.
#
#   tools/pin.sh python3.9 python3.10 python3.11
#
# The only place that resolves dependencies: set-up itself installs what is written there. Look at the difference, then
# run `make test-all` and `make test-pythons` before committing it.
set -euo pipefail

# Horovod and its build tools. pip 25.3 and wheel 0.46 lost functions that its setup.py calls.
readonly BUILD=('horovod==0.28.1' 'cmake>=3.13,<4' 'setuptools>=65,<70' 'wheel<0.46' 'pip<25.3')
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

resolve() {  # requirements -> sorted name==version lines
    "$scratch/venv/bin/python" -m pip install --quiet --dry-run --no-build-isolation \
        --ignore-installed --report "$scratch/report.json" "$@"
    "$scratch/venv/bin/python" -c '
import json, sys
found = [item["metadata"] for item in json.load(open(sys.argv[1]))["install"]]
for name, version in sorted((m["name"].lower().replace("_", "-").replace(".", "-"), m["version"]) for m in found):
    if name != "collective-strategy":
        print(name + "==" + version)' "$scratch/report.json"
}

mkdir -p "$root/tools/pins"
for python; do
    "$python" -m venv --clear "$scratch/venv"
    # An older pip resolves these requirements in hours, a newer one at once. Metadata are made without build isolation,
    # which would install TensorFlow for each.
    "$scratch/venv/bin/python" -m pip install --quiet --upgrade pip 'setuptools>=65,<70' 'wheel<0.46'
    version=$("$scratch/venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    resolve "$root[data,datasets,test]" "${BUILD[@]}" >"$scratch/pins"
    cat - "$scratch/pins" >"$root/tools/pins/python$version.txt" <<EOF
# Python $version, by tools/pin.sh: collective-strategy[data,datasets,test], Horovod and what builds it.
EOF
    echo "python$version: $(wc -l <"$scratch/pins") packages"
    resolve "$root[gpu]" 'tensorflow[and-cuda]' -c "$scratch/pins" | grep -vxFf "$scratch/pins" >"$scratch/gpu$version"
    if [ "$python" = "$1" ]; then
        cp "$scratch/gpu$version" "$scratch/gpu"
        first=$version
    elif ! cmp -s "$scratch/gpu" "$scratch/gpu$version"; then
        diff "$scratch/gpu" "$scratch/gpu$version" || true
        echo "gpu.txt is Python $first's; Python $version resolves it as above" >&2
    fi
done
cat - "$scratch/gpu" >"$root/tools/pins/gpu.txt" <<EOF
# Every Python, by tools/pin.sh: what GPU=1 adds, i.e. tensorflow[and-cuda] and collective-strategy[gpu].
EOF
