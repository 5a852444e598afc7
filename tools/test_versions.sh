#!/usr/bin/env bash
# Runs the unit tests, and a job of two ranks, on each supported TensorFlow and Python that this machine has:
# `make test-versions`.
#
#   tools/test_versions.sh [pytest's options]
#
# Each has an environment of its own, .venvs/2.21-3.12, which tools/setup.sh makes (once: 3 to 8 minutes each). A
# failure on one doesn't keep the others from their turn. The end names those that passed, failed and are missing, and
# stdout gets a table of them in Markdown; the exit code is 0 if none has failed.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=  # the checkout alone

say() { printf 'test-versions: %s\n' "$*" >&2; }

set_up() { TENSORFLOW=$tensorflow PYTHON=$interpreter VENV=$environment tools/setup.sh --quiet; }
unit_tests() { "$environment/bin/python" -m pytest tests/unit "${pytest_options[@]}"; }
job() {
    "$environment/bin/python" -m collective.launch -np 2 --device cpu \
        modelzoo/census_income/train.py --click-log --steps 50
}

test_one() {  # adds a row to the table; what comes after a failure isn't run
    local step row="| $tensorflow | $python |" code=0
    for step in set_up unit_tests job; do
        if [ $code != 0 ]; then
            row+=' not run |'
        elif "$step" </dev/null >&2; then
            row+=' passed |'
        else
            code=1
            row+=' FAILED |'
        fi
    done
    table+=("$row")
    return $code
}

pytest_options=("$@")
passed=() failed=() missing=() install=()
table=('| TensorFlow | Python | set-up | unit tests | a job of two ranks |' '|---|---|---|---|---|')
listed() { local list; list=$(printf '%s, ' "$@"); echo "${list%, }"; }
while read -r tensorflow python interpreter; do
    name="TensorFlow $tensorflow on Python $python"
    if [ "$interpreter" = - ]; then
        missing+=("$python")
        table+=("| $tensorflow | $python | not found | not run | not run |")
        continue
    fi
    say "$name ($interpreter) ..."
    environment=.venvs/$tensorflow-$python
    if test_one; then
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
printf '%s\n' "${table[@]}"
[ ${#passed[@]} != 0 ] && [ ${#failed[@]} = 0 ]
