#!/usr/bin/env bash
# Makes .venv: pinned packages, Horovod built against the TensorFlow among them, and this checkout.
#
#   tools/setup.sh [--quiet]            sets up, as `make setup` does; --quiet: without a word where nothing is to do
#   tools/setup.sh --without-horovod    the same, less Horovod: enough for CPU ranks of one host, and quiet
#   tools/setup.sh --dependencies       all but this checkout, for an image's layers: only tools/ and
#                                       collective/horovod_source.py are needed
#   tools/setup.sh --versions           lists each supported TensorFlow and Python, and where the Python is found:
#                                       "2.21 3.12 /usr/bin/python3.12", or "2.21 3.10 -" where it is not
#
#   VENV=.venvs/3.10                    another folder than .venv for the environment, in the checkout
#   TENSORFLOW=2.15                     the TensorFlow; else the newest one that a Python found here has
#   PYTHON=python3.10                   the interpreter; else the newest one found that has the TensorFlow, else one is
#                                       fetched
#   GPU=1                               TensorFlow with CUDA, CuPy, Horovod with NCCL (by CUDA's nvcc); GPU=0 undoes it
#   HOROVOD_CUDA_HOME=/usr/local/cuda   where GPU=1 finds nvcc, if it is not on the PATH
#   HOROVOD_NCCL_HOME=/usr              another NCCL than the one that TensorFlow brings
#
# An environment remembers its TENSORFLOW, PYTHON and GPU until they are given again.
#
# Where no Python is found that has the TensorFlow, one is fetched into .python of the checkout: by uv or conda where
# they are there, else by uv from PyPI. UV_PYTHON_INSTALL_MIRROR and conda's own settings name mirrors.
#
# Four steps: environment, packages, this package, Horovod. Each leaves a stamp in .venv/.setup that names its
# ingredients, and is repeated only when they change: a new pin costs a minute, and Horovod is built again only for
# another TensorFlow, Horovod, GPU setting or edit of its source. A call that is killed while it installs leaves
# `unfinished`, and the next one starts from an empty .venv. A lock keeps two calls apart, also for two environments,
# since both build in the checkout. Processes that a killed call leaves running hold the lock to their end.
set -euo pipefail

# Each TensorFlow that is tested whole, the newest first, and its Pythons, the newest first.
readonly RELEASES='2.21 2.15'
readonly -A PYTHONS=([2.21]='3.13 3.12 3.11 3.10' [2.15]='3.11 3.10 3.9')
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
folder=${VENV:-.venv}
readonly root folder venv=$root/$folder
readonly state=$venv/.setup
readonly fetched=$root/.python UV='uv>=0.8,<1'
readonly -A FETCHED=([2.21]=3.12 [2.15]=3.11)
mode=${1-}

# Neither the user's settings of Python and pip may lead out of the environment, nor make's job server into Horovod's
# make.
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
unset MAKEFLAGS MFLAGS GNUMAKEFLAGS MAKELEVEL
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'setup: %s\n' "$*" >&2; }
refuse() { say "$*"; exit 2; }
run() { echo "+ $*"; "$@"; }

attempt() {  # log, command: its output goes to the log; sets $code, and $interrupted where Ctrl-C ended it
    local log=$1
    shift
    code=0 interrupted=
    trap 'interrupted=1' INT  # pip ends like one that fails
    "$@" >"$log" 2>&1 </dev/null || code=$?
    trap - INT
}

end_if_interrupted() {
    if [ -n "$interrupted" ] || [ "$code" = 130 ]; then
        say 'interrupted. The next call does what is left'
        exit 130
    fi
}

readonly ERRORS='(error|ERROR|CMake Error[^:]*): |Killed|No space left'
# A compiler's or linker's whole command, as make and setuptools print it.
readonly COMMAND='^ *(\+ )?(cd [^ ]+ && )?([^ ]*/)?([a-z0-9_]+-linux-gnu-)?(c\+\+|g\+\+|cc|gcc|clang|clang\+\+|nvcc|ld|ar)(-[0-9.]+)? '
end_of() { tail -n 300 "$1" | { grep -vE "$COMMAND" || true; } | tail -n "$2"; }
indented() { sed -E 's/^(.{199}).{2,}/\1…/; s/^/    /'; }

# ---- The machine -----------------------------------------------------------------------------------------------------

# Everything that is missing, and the Debian packages that bring it, to be said at once.
lacking=() install=() otherwise=''
lacks() { lacking+=("$1"); shift; install+=("$@"); }

refuse_if_lacking() {
    local list
    if [ ${#lacking[@]} != 0 ]; then
        list=$(printf '%s, ' "${lacking[@]}")
        refuse "missing: ${list%, }. To install: apt-get install ${install[*]}$otherwise"
    fi
}

# Prints "3.11 3.11.7 missing,modules /real/executable" of an interpreter, or nothing where it does not run
# (a pyenv shim without that version does not). Written so that Python 2 can run it, and is refused by its version.
probe() {
    (cd / && "$1" -c '
import os, sys
missing = []
for name in ("venv", "ensurepip", "ssl", "zlib", "ctypes"):
    try:
        __import__(name)
    except ImportError:
        missing.append(name)
print("%d.%d %s %s %s" % (sys.version_info[0], sys.version_info[1], sys.version.split()[0],
                          ",".join(missing) or "-", os.path.realpath(sys.executable)))' 2>/dev/null) || true
}

examine() {  # sets $version, $release, $missing and $real
    read -r version release missing real <<<"$(probe "$1")"
    [ -n "$version" ]
}

lacks_modules() {  # executable, version, missing modules
    case $3 in
        venv* | ensurepip*) lacks "the venv module of $1" "python$2-venv" ;;
        *) lacks "$3 in $1" "python$2" "python$2-venv" ;;
    esac
}

candidates() {  # of one version, in the order in which they are tried
    local uv_folder=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python}
    type -aP "python$1" || true
    printf '%s\n' "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$1".*/bin/python | sort -rV
    printf '%s\n' "$fetched"/*/bin/"python$1" "$uv_folder"/*/bin/"python$1"
    type -aP python3 python || true
}

examine_others() {  # python3.10: the first program of that version that runs, where the first of that name does not
    local candidate
    while read -r candidate; do
        if [ -x "$candidate" ] && examine "$candidate" && [ "python$version" = "$1" ]; then
            interpreter=$candidate
            return
        fi
    done < <(candidates "${1#python}")
    return 1
}

use_python() {  # name; takes the interpreter that PYTHON= names; sets $interpreter and the variables of `examine`
    interpreter=$(type -P "$1") || refuse "PYTHON=$1 is no program here: leave PYTHON unset to have one looked for," \
        "and else fetched"
    case $interpreter in /*) ;; *) interpreter=$PWD/$interpreter ;; esac
    examine "$interpreter" || examine_others "$1" || refuse "PYTHON=$1 ($interpreter) does not run: name another," \
        "or leave PYTHON unset to have one looked for"
    tensorflow=$(first_with "$version") || refuse "PYTHON=$1 is Python $release, but $(needs_of $wanted):" \
        "leave PYTHON unset to have one looked for, and else fetched"
    [ "$missing" = - ] || lacks_modules "$interpreter" "$version" "$missing"
}

first_with() {  # version of a Python: prints the first of the wanted releases of TensorFlow that it has
    local each
    for each in $wanted; do
        case " ${PYTHONS[$each]} " in *" $1 "*) echo $each; return ;; esac
    done
    return 1
}

has_one_wanted() {  # a program, perhaps gone: whether it is a Python that has one of the wanted releases
    local path
    path=$(type -P "$1") && examine "$path" && first_with "$version" >/dev/null
}

needs_of() {  # releases: "TensorFlow 2.15 needs Python 3.11, 3.10 or 3.9"
    local each list=''
    for each; do list+="${list:+, and }TensorFlow $each needs one of Python ${PYTHONS[$each]// /, }"; done
    echo "$list"
}

# Finds the first interpreter of a version that has all it needs; sets the variables of `use_python`. Notes in
# $incomplete the first that lacks something, in $others the releases of other versions that it comes across, in
# $helper the first of these that is complete, for uv from PyPI.
incomplete=() others=' ' helper=
find_version() {
    while read -r interpreter; do
        [ -x "$interpreter" ] && examine "$interpreter" || continue
        if [ "$version" != "$1" ]; then
            case $others in *" $release "*) ;; *) others+="$release " ;; esac
            case $version:$missing in [12].* | 3.[0-7]:*) ;; *:-) helper=${helper:-$interpreter} ;; esac
        elif [ "$missing" = - ]; then
            return
        elif [ ${#incomplete[@]} = 0 ]; then
            incomplete=("$interpreter" "$version" "$missing")
        fi
    done < <(candidates "$1")
    return 1
}

# Finds the newest of the wanted releases of TensorFlow for which there is an interpreter that has all it needs, and the
# newest of these; sets $tensorflow and the variables of `use_python`.
find_python() {
    local each
    for tensorflow in $wanted; do
        for each in ${PYTHONS[$tensorflow]}; do
            ! find_version "$each" || return 0
        done
    done
    tensorflow=${wanted%% *}
    if [ ${#incomplete[@]} != 0 ]; then
        lacks_modules "${incomplete[@]}"
    else
        find_fetchers
        others=$(echo $others)
        absent="Python ${PYTHONS[$tensorflow]// /, } for TensorFlow $tensorflow${others:+ (there is only ${others// /, })}"
        if [ ${#fetchers[@]} = 0 ]; then
            lacks "one of $absent or what fetches it (uv, conda, python3 with venv)" python3 python3-venv
            otherwise=$image
        fi
    fi
}

# ---- A Python for a machine that has none ----------------------------------------------------------------------------

readonly image='; or use the image, which has all that is needed: make image'
absent='' fetchers=()
find_fetchers() {  # sets $fetchers: the programs that can fetch a Python, in the order in which they are tried
    local program
    for program in uv micromamba mamba conda "${MAMBA_EXE:-}" "${CONDA_EXE:-}"; do
        program=$(type -P "$program") || continue
        case " ${fetchers[*]-} " in *" $program "*) ;; *) fetchers+=("$program") ;; esac
    done
    [ -z "$helper" ] || fetchers+=('uv from PyPI')
}

fetch_python() {  # tries the fetchers in turn; sets the variables of `use_python`
    local fetcher log=$fetched/fetch.log
    mkdir -p "$fetched"
    for fetcher in "${fetchers[@]}"; do
        say "no $absent here: $fetcher fetches Python ${FETCHED[$tensorflow]} into $fetched (PYTHON= names one instead) ..."
        attempt "$log" fetch_by "$fetcher"
        if [ $code = 0 ] && find_version "${FETCHED[$tensorflow]}"; then
            return
        fi
        end_if_interrupted
        say 'this failed. The end of its output:'
        end_of "$log" 5 | indented >&2
    done
    refuse "no Python could be fetched. UV_PYTHON_INSTALL_MIRROR= names a mirror for uv, PYTHON= an interpreter$image"
}

fetch_by() {
    local code=0
    case $1 in
        'uv from PyPI')
            rm -rf "$fetched/uv"
            run "$helper" -m venv "$fetched/uv" &&
                run "$fetched/uv/bin/python" -m pip install --only-binary :all: "$UV" &&
                fetch_by_uv "$fetched/uv/bin/uv" || code=$?
            rm -rf "$fetched/uv"
            return $code
            ;;
        */uv) fetch_by_uv "$1" ;;
        *)
            rm -rf "$fetched/conda"
            (cd / && run "$1" create --yes --prefix "$fetched/conda" --channel conda-forge "python=${FETCHED[$tensorflow]}")
            ;;
    esac
}

fetch_by_uv() {  # it would put a link into ~/.local/bin, too
    (cd / && UV_PYTHON_INSTALL_DIR=$fetched UV_PYTHON_INSTALL_BIN=0 run "$1" python install "${FETCHED[$tensorflow]}")
}

check_compiler() {  # Horovod includes no Python.h, so Python's headers are not needed
    local program='#include <vector>
int main() { return std::vector<int>().size(); }'
    if ! type -P g++ >/dev/null; then
        lacks g++ g++
    elif ! g++ -std=c++17 -x c++ -fsyntax-only - <<<"$program" 2>/dev/null; then
        lacks "a g++ that compiles C++17 ($(type -P g++) does not)" g++
    fi
    type -P make >/dev/null || lacks make make
}

check_cuda() {  # Horovod compiles a CUDA kernel, and TensorFlow's CUDA packages bring no nvcc
    local home=${HOROVOD_CUDA_HOME:-${CUDA_HOME:-}} nvcc release
    nvcc=$(type -P nvcc) && home=${home:-$(dirname "$(dirname "$(readlink -f "$nvcc")")")}
    export HOROVOD_CUDA_HOME=${home:-/usr/local/cuda}
    nvcc=$HOROVOD_CUDA_HOME/bin/nvcc
    release=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p') || true
    case $release in
        12.*) check_compiler_of_nvcc "${release#12.}" ;;
        *) lacks "CUDA 12's compiler ($nvcc is ${release:-not there}; HOROVOD_CUDA_HOME= names another place)" \
            "cuda-toolkit-12-2 (from NVIDIA's package source)" ;;
    esac
}

check_compiler_of_nvcc() {  # minor version of CUDA 12; nvcc refuses a newer g++ in the middle of Horovod's build
    local compiler=${CXX:-g++} newest=12 found
    [ "$1" -lt 4 ] || newest=13
    [ "$1" -lt 8 ] || newest=14
    found=$("$compiler" -dumpversion 2>/dev/null) || return 0
    if [ "${found%%.*}" -gt "$newest" ]; then
        lacks "g++ $newest or older, which is what nvcc 12.$1 takes ($(type -P "$compiler") is $found; CXX= names another)" \
            "g++-$newest, then CXX=g++-$newest"
    fi
}

# ---- The steps -------------------------------------------------------------------------------------------------------

pip() { run "$venv/bin/python" -m pip "$@"; }

make_environment() { run "$interpreter" -m venv "$venv"; }

install_packages() {
    cat "${pin_files[@]}" | grep -v '^horovod==' >"$state/packages.txt" || return
    grep -E '^(pip|setuptools|wheel)==' "$base_pins" >"$state/build-tools.txt" || return
    pip install -r "$state/build-tools.txt" && pip install --no-build-isolation -r "$state/packages.txt"
}

build_horovod() {  # a wheel first: a build that is killed leaves nothing installed
    local jobs memory nccl
    jobs=$(nproc)
    memory=$(awk '/^MemAvailable/ { print int($2 / 1500000) }' /proc/meminfo)  # a compiler takes about a gigabyte
    [ "$jobs" -le "$memory" ] || jobs=$((memory > 1 ? memory : 1))
    export MAKEFLAGS=-j$jobs PATH=$venv/bin:$PATH  # for cmake
    # Horovod asks the first nvcc of the PATH for its architectures, whichever one it then compiles with.
    [ "$gpu" = 0 ] || PATH=$HOROVOD_CUDA_HOME/bin:$PATH
    if [ "$gpu" = 1 ] && [ -z "${HOROVOD_NCCL_HOME-}" ]; then
        # The very NCCL that TensorFlow loads. Its package has no libnccl.so to link with, nor is it on a library path.
        nccl=$(echo "$venv"/lib/python*/site-packages/nvidia/nccl)
        ln -sf libnccl.so.2 "$nccl/lib/libnccl.so" || return
        export HOROVOD_NCCL_HOME=$nccl HOROVOD_NCCL_LINK=SHARED LDFLAGS="-Wl,-rpath,$nccl/lib ${LDFLAGS-}"
    fi
    rm -rf "$state/wheels"
    run env "${horovod_build[@]}" "$venv/bin/python" "$root/collective/horovod_source.py" "$horovod" "$state/wheels" ||
        return
    touch "$state/unfinished"
    pip install --no-deps --force-reinstall "$state"/wheels/horovod-*.whl || return
    rm -rf "$state/unfinished" "$state/wheels"
    run "$venv/bin/python" -c "
import horovod.tensorflow as hvd
assert hvd.gloo_built(), 'Horovod was built without Gloo'
assert $gpu == 0 or hvd.nccl_built(), 'Horovod was built without NCCL'"
}

# Older environments have it by the name `collective`, whose files are those of the new one.
install_package() {
    pip uninstall --yes collective && pip install --no-deps --no-build-isolation --editable "$root" && link_package &&
        pip check
}

# An editable install of these folders is an import hook, which neither type checkers nor editors follow: they follow a
# folder on the path. It holds a link to the package and nothing else; the checkout itself would bring `tests`, `launch`
# and others along as modules.
link_package() {
    local site=("$venv"/lib/python3*/site-packages) path=$venv/checkout
    run rm -rf "$path" && run mkdir "$path" && run ln -s "$root/collective" "$path/collective" &&
        echo "$path" >"${site[0]}/collective_checkout.pth"
}

in_checkout() { (cd "$root" && "$1"); }

is_done() { [ -f "$state/$1" ] && [ "$(<"$state/$1")" = "${key[$1]}" ]; }

step() {  # name, description, function: the output goes to a log, which is named if it fails
    local started=$SECONDS log=$state/$1.log
    if is_done "$1"; then
        return
    fi
    say "$2 ..."
    rm -f "$state/$1"
    case $1 in packages | package) touch "$state/unfinished" ;; esac
    attempt "$log" in_checkout "$3"
    if [ $code != 0 ]; then
        [ "$1" = packages ] || rm -f "$state/unfinished"  # it ended, if badly: nothing is half installed
        end_if_interrupted
        say "this failed. The errors in its output, and its end:"
        { grep -nE -m 5 "$ERRORS" "$log" || true; end_of "$log" 15; } | indented >&2
        say "all of its output is in $log"
        exit 1
    fi
    rm -f "$state/unfinished"
    echo "${key[$1]}" >"$state/$1"
    say "    took $((SECONDS - started)) s"
}

# ---- All of it -------------------------------------------------------------------------------------------------------

case $mode in
    '' | --quiet | --dependencies | --without-horovod) ;;
    --versions)
        for tensorflow in $RELEASES; do
            for each in ${PYTHONS[$tensorflow]}; do
                find_version "$each" || interpreter=-
                echo "$tensorflow $each $interpreter"
            done
        done
        exit
        ;;
    *) refuse "$mode is no option: there are --quiet, --without-horovod, --dependencies and --versions" ;;
esac
case $folder in
    /* | *..*) refuse "VENV=$folder is no folder in this checkout: name one, like .venvs/3.10, or leave VENV unset" ;;
esac

case ${GPU-} in '' | 0 | 1) ;; *) refuse "GPU=$GPU is neither 1 (CUDA, NCCL, CuPy) nor 0 (CPU only)" ;; esac
[ -z "${TENSORFLOW-}" ] || [ -n "${PYTHONS[$TENSORFLOW]-}" ] ||
    refuse "TENSORFLOW=$TENSORFLOW is none of ${RELEASES// /, }: name one of these, or leave TENSORFLOW unset for the" \
        "newest one that a Python here has"
[ "$(uname -s)" = Linux ] || refuse "Linux only: there is no Horovod with TensorFlow for $(uname -s)"
type -P flock >/dev/null || lacks flock util-linux
refuse_if_lacking

exec 9>"$root/.venv.lock"  # next to the environment, which may be removed while another call waits
flock --nonblock 9 || { say 'another set-up is at work here; waiting for it'; flock 9; }

if [ -e "$venv" ] && [ ! -d "$state" ]; then
    refuse "$venv is not of this script's making: move it away, then call this again"
fi
remembered() { if [ -f "$state/$1" ]; then cat "$state/$1"; fi; }
gpu=${GPU:-$(remembered GPU)}
gpu=${gpu:-0}
told=${PYTHON:-$(remembered PYTHON)}
asked=${TENSORFLOW:-$(remembered TENSORFLOW)}
wanted=${asked:-$RELEASES}

tensorflow='' version='' release='' missing='' real='' interpreter=''
environment_key() { echo "tensorflow $tensorflow, python $version, gpu $gpu, of $real, in $root"; }
environment_is_due() {
    [ ! -x "$venv/bin/python" ] || [ -f "$state/unfinished" ] || [ "$(remembered environment)" != "$(environment_key)" ]
}
[ ! -f "$state/interpreter" ] || read -r tensorflow version real <"$state/interpreter"
if [ -n "${PYTHON-}${TENSORFLOW-}" ] || environment_is_due; then
    if [ -n "${PYTHON-}" ] || { [ -n "$told" ] && has_one_wanted "$told"; }; then
        use_python "$told"
    else
        told=
        find_python
    fi
fi
if [ ${#lacking[@]} != 0 ] || [ ${#fetchers[@]} != 0 ]; then
    check_compiler
    refuse_if_lacking
fi
[ ${#fetchers[@]} = 0 ] || fetch_python

readonly pins=$root/tools/pins/tensorflow$tensorflow
base_pins=$pins/python$version.txt pin_files=("$pins/python$version.txt")
[ "$gpu" = 0 ] || pin_files+=("$pins/gpu.txt")
horovod=$(grep '^horovod==' "$base_pins") tensorflow_pin=$(grep '^tensorflow==' "$base_pins")
horovod_build=(
    HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
    HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
    CMAKE_POLICY_VERSION_MINIMUM=3.5  # Horovod's Gloo was written for CMake 2.8
)
[ "$gpu" = 0 ] || horovod_build+=(
    HOROVOD_GPU_OPERATIONS=NCCL
    HOROVOD_BUILD_CUDA_CC_LIST="${HOROVOD_BUILD_CUDA_CC_LIST:-70,80,90}"  # V100, A100, H100; no GPU need be here
)
hash_of() { cat "$@" | sha256sum; }
declare -A key=(
    [environment]=$(environment_key)
    [packages]=$(hash_of "${pin_files[@]}")
    [horovod]="$horovod $tensorflow_pin ${horovod_build[*]} $(hash_of "$root/collective/horovod_source.py")"
)
steps=(packages)
if [ "$mode" != --dependencies ]; then
    steps+=(package)
    # The package's code is read where it lies: only its metadata is installed, and libraries compiled, one against TensorFlow.
    key[package]="$tensorflow_pin, by a link $(hash_of "$root/setup.py" "$root"/ops/native/{,gpu/}*.{cc,h} <(sed '/^\[tool\.ruff\]/,$d' "$root/pyproject.toml"))"
fi
[ "$mode" = --without-horovod ] || steps+=(horovod)

due=
if environment_is_due; then
    due="environment ${steps[*]}"
else
    for name in "${steps[@]}"; do is_done $name || due+=" $name"; done
fi
if [ -z "$due" ]; then
    case $mode in --quiet | --without-horovod) exit ;; esac
    say "$folder is up to date (TensorFlow $tensorflow, Python $version, ${horovod/==/ }, GPU=$gpu)"
    exit
fi
case "$due " in *' package '* | *' horovod '*) check_compiler ;; esac
case "$due " in *' horovod '*) [ "$gpu" = 0 ] || check_cuda ;; esac
refuse_if_lacking
case $due in
    *environment*)
        [ ! -f "$state/unfinished" ] || say 'the last set-up did not finish: starting again'
        case $interpreter in "$venv"/*) interpreter=$real ;; esac
        mkdir -p "$state"
        touch "$state/unfinished"
        rm -rf "$state"/{environment,packages,horovod,package,wheels}
        # Not .setup: should this call be killed, it tells the next one that the folder is of this script's making.
        find "$venv" -mindepth 1 -maxdepth 1 ! -name .setup -exec rm -rf {} +
        printf '%s %s %s\n' "$tensorflow" "$version" "$real" >"$state/interpreter"
        ;;
esac
echo "$asked" >"$state/TENSORFLOW"
echo "$told" >"$state/PYTHON"
echo "$gpu" >"$state/GPU"
step environment "a virtual environment of Python $release ($interpreter)" make_environment
step packages "packages: $tensorflow_pin and what goes with it (one to three minutes)" install_packages
[ "$mode" = --dependencies ] || step package 'this package, to be used where it lies (a minute)' install_package
if [ "$mode" = --without-horovod ]; then
    say "done in $SECONDS s: $folder has TensorFlow $tensorflow, Python $version, GPU=$gpu; make setup adds Horovod"
    exit
fi
step horovod "$horovod, built against $tensorflow_pin (2 to 5 minutes on two cores)" build_horovod
say "done in $SECONDS s: $folder has TensorFlow $tensorflow, Python $version, ${horovod/==/ }, GPU=$gpu"
