#!/usr/bin/env bash
# Runs the unit tests, and a job of two ranks, on each supported TensorFlow and Python that this machine has:
# `make test-versions`.
#
#   tools/test_versions.sh [pytest's options]
#
# Each has an environment of its own, .venvs/2.21-3.12, which tools/setup.sh makes (once: 3 to 8 minutes each). A
# failure on one doesn't keep the others from their turn. The end names those that passed, failed and are missing; the
# exit code is 0 if none has failed.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=  # the checkout alone

say() { printf 'test-versions: %s\n' "$*" >&2; }

test_one() {  # TensorFlow, interpreter, environment
    TENSORFLOW=$1 PYTHON=$2 VENV=$3 tools/setup.sh --quiet &&
        "$3/bin/python" -m pytest tests/unit "${pytest_options[@]}" &&
        "$3/bin/python" -m collective.launch -np 2 --device cpu \
            modelzoo/census_income/train.py --click-log --steps 50
}

pytest_options=("$@")
passed=() failed=() missing=() install=()
listed() { local list; list=$(printf '%s, ' "$@"); echo "${list%, }"; }
while read -r tensorflow python interpreter; do
    name="TensorFlow $tensorflow on Python $python"
    if [ "$interpreter" = - ]; then
        missing+=("$python")
        continue
    fi
    say "$name ($interpreter) ..."
    if test_one "$tensorflow" "$interpreter" ".venvs/$tensorflow-$python" </dev/null; then
        passed+=("$tensorflow on $python")
    else
        failed+=("$tensorflow on $python")
    fi
done < <(tools/setup.sh --versions)

[ ${#passed[@]} = 0 ] || say "passed: TensorFlow $(listed "${passed[@]}")"
[ ${#failed[@]} = 0 ] || say "FAILED: TensorFlow $(listed "${failed[@]}"): see above"
if [ ${#missing[@]} != 0 ]; then
    mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -ruV)
    for python in "${missing[@]}"; do install+=("python$python python$python-venv"); done
    say "not tested: Python $(listed "${missing[@]}"), which this machine lacks. To install: apt-get install ${install[*]}"
fi
[ ${#passed[@]} != 0 ] && [ ${#failed[@]} = 0 ]
