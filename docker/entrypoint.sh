#!/bin/sh
# Runs a program of the image (python, bash, tensorboard, ...) as it is, and everything else by the launcher:
# its options, `-m module`, or a script, each with arguments.
set -eu

case ${1-} in
    '' | -* | */* | *.py) ;;
    *)
        if command -v -- "$1" >/dev/null; then
            exec "$@"
        fi
        ;;
esac
exec python -m collective.launch "$@"
