#!/usr/bin/env bash
# Does what one call of a GPU machine is for; README.md has the list.
#
#   tools/gpu/call.sh NAME [RESULTS]         in a checkout on the GPU machine
#   tools/gpu/call.sh --rehearse NAME DIR    without a GPU: commands that need one must refuse for lack of it, the rest
#                                            runs; DIR stands for the home folder there
#
# PYTHON=python3 is what has CuPy there; SECONDS_LEFT shortens a call's limit. What a call has found goes to RESULTS, also
# where its time ran out. The exit code is 0 if nothing was wrong.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
cd "$root"
export PYTHONPATH=$root
readonly FAMILIES='distinct partition gather occurrences sums pool update hash_table reserved step'
rehearsed=
if [ "${1-}" = --rehearse ]; then
    rehearsed=1
    shift
    HOME=${2:?call.sh: --rehearse NAME DIR}
    set -- "$1" "$2/results"
fi
name=${1:?call.sh: name a call: checks, times, sanitizer, profile, unpack, binding} results=${2:-results}
python=${PYTHON:-python3}
mkdir -p "$results" "$HOME/pieces"

# Every call brings pieces along.
for piece in .gpu/piece.*; do
    [ ! -e "$piece" ] || cp "$piece" "$HOME/pieces/"
done

failed=0
# Runs a command for at most so many seconds; its output is shown, and kept under a name.
within() {  # seconds, name, command
    local limit=$1 log=$results/$2.txt code=0
    shift 2
    [ -z "${SECONDS_LEFT-}" ] || [ "$limit" -le "$SECONDS_LEFT" ] || limit=$SECONDS_LEFT
    timeout --kill-after 5 "$limit" "$@" 2>&1 | tee "$log" || code=${PIPESTATUS[0]}
    case $code in
        124 | 137) echo "call: $name: the time of $limit s was over: $*" | tee -a "$log" ;;
    esac
    [ "$code" = 0 ] || failed=1
    return 0
}

on_gpu() {  # the same, of what needs a GPU; a rehearsal wants to be refused for lack of one
    local limit=$1 log=$results/$2.txt
    within "$@"
    [ -n "$rehearsed" ] || return 0
    grep -qE '^gpu_check: CuPy can |RuntimeError: CuPy can ' "$log" || { echo "call: $2 was to say that CuPy can't"; exit 1; }
    failed=0
}

has() { type -P "$1" >/dev/null || { echo "call: $name needs $1, which is not there"; exit 2; }; }

case $name in
    checks)
        [ -n "$rehearsed" ] || nvidia-smi -L
        # Small ones first: they fill CuPy's cache on disk, so that no process compiles what another one does.
        on_gpu 90 small "$python" -u -m collective.ops.gpu_check --small
        on_gpu 320 checks "$python" -u -m collective.ops.gpu_check --no-times --keys 1000000 --processes 10
        ;;
    times)
        families=()
        for family in gather pool update step distinct hash_table occurrences sums partition reserved; do
            families+=(--family "$family")
        done
        on_gpu 310 table "$python" -u -m collective.ops.gpu_check --no-checks --json "$results/gpu.json" "${families[@]}"
        ;;
    sanitizer)
        [ -n "$rehearsed" ] || has compute-sanitizer
        for tool in memcheck racecheck; do
            program=(compute-sanitizer --tool "$tool" --error-exitcode 3)
            [ -z "$rehearsed" ] || program=()
            for family in $FAMILIES; do
                timeout --kill-after 5 270 "${program[@]}" "$python" -u -m collective.ops.gpu_check --small --family "$family" \
                    >"$results/$tool.$family.txt" 2>&1 && echo ok >"$results/$tool.$family.code" ||
                    echo $? >"$results/$tool.$family.code" &
            done
        done
        wait
        for tool in memcheck racecheck; do
            for family in $FAMILIES; do
                code=$(<"$results/$tool.$family.code")
                echo "$tool $family: $code ($(tail -n 1 "$results/$tool.$family.txt"))"
                case $code:$rehearsed in ok: | 2:1) ;; *) failed=1 ;; esac
            done
        done
        ;;
    profile)
        kernels='pool_rows|update_adagrad|gather_rows|sum_rows|occurrences_place|distinct_insert|hash_table_find'
        if [ -n "$rehearsed" ]; then
            within 200 profile "$python" tools/gpu/one_step.py --emulated
        else
            has ncu
            within 200 profile ncu --clock-control none --set full -k "regex:$kernels" -c 20 -f -o "$results/kernels" \
                "$python" tools/gpu/one_step.py
            within 30 counters ncu -i "$results/kernels.ncu-rep" --page details --csv
        fi
        ;;
    unpack)
        rm -rf "$HOME/tf" && mkdir "$HOME/tf"
        cat "$HOME"/pieces/piece.* | within 300 unpack "$python" -c "
import lzma, sys, tarfile
with lzma.open(sys.stdin.buffer) as unpacked, tarfile.open(fileobj=unpacked, mode='r|') as archive:
    archive.extractall(sys.argv[1])" "$HOME/tf"
        cp -n "$HOME"/tf/native/*.so ops/ || true
        ls "$HOME/tf"
        ;;
    binding)
        tf=$HOME/tf
        export LD_LIBRARY_PATH=$tf/stubs:$tf/site/nvidia/cuda_runtime/lib:$tf/python/lib PYTHONPATH=$root:$tf/site
        # TensorFlow's kernels are compiled at their first use.
        export CUDA_CACHE_MAXSIZE=4294967296 TF_CPP_MIN_LOG_LEVEL=0 PYTHONNOUSERSITE=1
        python=$tf/python/bin/$(cd "$tf/python/bin" && ls python3.*)
        program=("$python" -u)
        if [ -n "$rehearsed" ]; then
            program+=(-m tests.gpu_double)
        else
            export COLLECTIVE_KERNELS=gpu
        fi
        within 60 devices "$python" -c "
import tensorflow as tf
print('TensorFlow', tf.__version__, 'of', tf.__file__)
print('GPUs:', tf.config.list_physical_devices('GPU'))"
        within 240 binding "${program[@]}" -m collective.ops.gpu_check --tensorflow
        within 90 calls "${program[@]}" benchmarks/binding.py
        ;;
    *)
        echo "call: there is no call $name: checks, times, sanitizer, profile, unpack, binding"
        exit 2
        ;;
esac
exit $failed
