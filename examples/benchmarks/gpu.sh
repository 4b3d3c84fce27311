#!/usr/bin/env bash
# Tests and measures clamp on a machine with an NVIDIA GPU, from a checkout and a driver to results, in 25 minutes.
#
#   examples/benchmarks/gpu.sh                         writes examples/benchmarks/results/<device>-<date>/
#   WHEELS=folder examples/benchmarks/gpu.sh           installs from a folder of wheels: no network is needed
#   examples/benchmarks/gpu.sh --dry-run               the same steps at the smallest sizes, on PoCL
#
# Options:
#   --device NAME   as of `python -m clamp bench` (nvidia); the driver is looked for only where the name is nvidia
#   --out FOLDER    where results go
#   --venv FOLDER   the virtual environment, made if it is not there (.venv)
#   --minutes N     ends after so long, whatever is left to do (25)
#   --steps A,B     only these: doctor, conformance, gemm, guide, conv, attention, resnet,
#                   timeline-guide, timeline-resnet, tune, netcl
#   --quick         the smallest sizes
#   --dry-run       --device pocl --quick
#   --find          prints where the driver's OpenCL library is, and ends
#
# PYTHON names the interpreter that the environment is made with, 3.11 or newer. Where it has torch, the environment
# sees it, and cuBLAS is measured beside clamp. A folder of wheels is made on a machine like this one, with network:
#   pip wheel --wheel-dir folder ".[gpu]" "hatchling>=1.28" pip
#
# Each step has a limit of time and writes its results as they come, so that what cuts one off leaves the others. The
# exit status is that of the first step that failed.
set -uo pipefail

LIBRARY=libnvidia-opencl.so
DEVICE=nvidia OUT='' VENV=.venv MINUTES=25 STEPS='' QUICK='' FIND=''

usage() {
    awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
}

while [ $# -gt 0 ]; do
    case $1 in
        --device | --out | --venv | --minutes | --steps)
            [ $# -gt 1 ] || { echo "$1 needs a value" >&2; exit 2; }
            case $1 in
                --device) DEVICE=$2 ;;
                --out) OUT=$(realpath -m "$2") ;;
                --venv) VENV=$(realpath -ms "$2") ;;
                --minutes) MINUTES=$2 ;;
                --steps) STEPS=$2 ;;
            esac
            shift ;;
        --quick) QUICK=yes ;;
        --dry-run) DEVICE=pocl QUICK=yes ;;
        --find) FIND=yes ;;
        -h | --help) usage; exit 0 ;;
        *) echo "unknown option $1; --help prints what there is" >&2; exit 2 ;;
    esac
    shift
done
[[ $MINUTES =~ ^[1-9][0-9]*$ ]] || { echo "--minutes $MINUTES: write a number" >&2; exit 2; }
DEADLINE=$((MINUTES * 60))
WHEELS=${WHEELS:+$(realpath -m "$WHEELS")}
cd "$(dirname "$0")/../.." || exit 1

# ------------------------------------------------------------------------------------------------- the driver

# The folders in which drivers and containers put libraries, one a line.
driver_folders() {
    local machine folder
    machine=$(uname -m)
    tr : '\n' <<<"${LD_LIBRARY_PATH:-}"
    PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null |
        awk -v name="$LIBRARY" 'index($0, name) && !/i386|lib32/ { sub(/\/[^\/]*$/, "", $NF); print $NF }'
    for folder in "/usr/lib/$machine-linux-gnu" "/usr/lib/$machine-linux-gnu/nvidia/current" /usr/lib64 \
        /usr/lib64/nvidia /usr/lib /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/lib/wsl/lib \
        /usr/lib/wsl/drivers/* /usr/local/cuda*/compat /usr/local/cuda*/lib64 /usr/local/cuda*/targets/*/lib \
        /run/opengl-driver/lib /run/nvidia/driver/usr/lib/* /opt/nvidia/lib64 /opt/*/lib64; do
        echo "$folder"
    done
}

# Prints the path of NVIDIA's OpenCL library, wherever a container mounts it.
find_library() {
    local folder file
    while IFS= read -r folder; do
        for file in "$folder/$LIBRARY".1 "$folder/$LIBRARY".[0-9]*; do
            [ -n "$folder" ] && [ -e "$file" ] && { echo "$file"; return; }
        done
    done < <(driver_folders)
    file=$(timeout 30 find / \( -path /proc -o -path /sys -o -path /dev -o -name 'i386*' -o -name lib32 \) -prune \
        -o -name "$LIBRARY.[0-9]*" -print -quit 2>/dev/null)
    [ -n "$file" ] && echo "$file"
}

# Containers often hold the library without the .icd file that tells the loader of it. Nothing is written to /etc.
register_driver() {
    local library folder
    grep -qs nvidia "${OCL_ICD_VENDORS:-/etc/OpenCL/vendors}"/*.icd && return
    if ! library=$(find_library); then
        echo "no $LIBRARY.1: install NVIDIA's driver with OpenCL, or start the container with" \
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility" >&2
        return 1
    fi
    folder=$(dirname "$library")
    VENDORS=$(mktemp -d)
    trap 'rm -rf "$VENDORS"' EXIT
    echo "$library" >"$VENDORS/nvidia.icd"
    export OCL_ICD_VENDORS=$VENDORS
    # It loads NVIDIA's compiler, which lies beside it, by its bare name.
    export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    echo "OpenCL library: $library"
}

if [ -n "$FIND" ]; then
    find_library
    exit
fi
if [ "$DEVICE" = nvidia ]; then
    register_driver || exit 1
fi

# ------------------------------------------------------------------------------------------------- Python

PY=$VENV/bin/python

is_installed() {
    # -P: not the checkout's own folders, in which it would find clamp without its kernels
    "$PY" -P -c 'import clamp.cli, clamp.kernels, hypothesis, ml_dtypes, pytest, rich, xdist' 2>/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$name"; return; }
    done
    echo "no Python 3.11 or newer: name one in PYTHON" >&2
    return 1
}

install() {
    local base wheels=() pip seen
    [ -z "$WHEELS" ] || wheels=(--no-index --find-links "$WHEELS")
    if [ ! -x "$PY" ]; then
        base=$(find_python) || return 1
        "$base" -m venv "$VENV" 2>/dev/null ||
            "$base" -m venv --clear --without-pip "$VENV" || return 1  # Debian's has no ensurepip
        # --system-site-packages would pass over those of a virtual environment, in which torch often is
        seen=$("$base" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' 2>/dev/null) &&
            echo "$seen" >"$("$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
    fi
    pip=("$PY" -m pip)
    if ! "${pip[@]}" --version >/dev/null 2>&1; then
        pip=("${base:-python3}" -m pip --python "$PY")
        [ -z "$WHEELS" ] || pip=("$PY" "$(ls "$WHEELS"/pip-*.whl)/pip")
    fi
    timeout 300 "${pip[@]}" install --quiet --disable-pip-version-check "${wheels[@]}" -e ".[gpu]"
}

is_installed || install || { echo "clamp could not be installed into $VENV" >&2; exit 1; }

# ------------------------------------------------------------------------------------------------- the steps

NAME='import sys; from clamp.cli.devices import choose_device, slug; print(slug(choose_device(sys.argv[1])))'
name=$("$PY" -c "$NAME" "$DEVICE" 2>/dev/null) || { "$PY" -m clamp doctor --device "$DEVICE"; exit 1; }
OUT=${OUT:-examples/benchmarks/results/$name-$(date -u +%F)}
mkdir -p "$OUT" || exit 1
STATUS=0

# step NAME SECONDS COMMAND...: what it prints goes to NAME.txt, and how it ended to steps.txt.
step() {
    local name=$1 limit=$2 began=$SECONDS left=$((DEADLINE - SECONDS)) status
    shift 2
    [ -z "$STEPS" ] || [[ ,$STEPS, == *",$name,"* ]] || return 0
    if ((left < 10)); then
        echo "$name: no time left" | tee -a "$OUT/steps.txt"
        return
    fi
    ((limit < left)) || limit=$left
    printf '\n=== %s (at most %d s)\n' "$name" "$limit"
    # An interrupt lets a command print what it has. In the foreground only the command itself gets it, and once.
    timeout --foreground --signal=INT --kill-after=20 "$limit" "$@" 2>&1 | tee "$OUT/$name.txt"
    status=${PIPESTATUS[0]}
    echo "$name: status $status after $((SECONDS - began)) s" >>"$OUT/steps.txt"
    ((STATUS)) || STATUS=$status
}

# bench NAME SECONDS ARGUMENT...: a part of the benchmark, whose rows go to NAME.json.
bench() {
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$PY" -m clamp bench --device "$DEVICE" --quick --json "$OUT/$name.json" "$@"
}

# timeline NAME SECONDS ARGUMENT...: what the device did in one step, with a picture.
timeline() {
    bench "$@" --timeline --plot "$OUT/$1.png"
}

# tune SECONDS: what the other steps measured untuned; later runs of this user find what it keeps.
tune() {
    step tune "$1" "$PY" -m clamp tune --device "$DEVICE" --json "$OUT/tune.json"
}

# test_on SECONDS FILE...: tests of numbers on the device alone.
test_on() {
    local limit=$1
    shift
    step conformance "$limit" env -u CLAMP_TEST_SLOW CLAMP_TEST_DEVICES="$DEVICE" \
        "$PY" -m pytest -v -n0 -p no:cacheprovider "$@"
}

: >"$OUT/steps.txt"
if command -v nvidia-smi >/dev/null; then
    step driver 20 nvidia-smi
fi
step doctor 240 "$PY" -m clamp doctor --device "$DEVICE"
if [ -n "$QUICK" ]; then
    test_on 120 tests/ops/test_cast.py
    bench gemm 120 --only gemm --sizes 32 --layouts NN,TT --no-netcl
    bench guide 120 --only guide --step 2x32x8
    bench conv 120 --only conv --convs one --images 1 --no-netcl
    bench attention 120 --only attention --attention 1x2x16x8 --no-netcl
    bench resnet 120 --only resnet --resnet 4x2 --no-netcl
    timeline timeline-guide 60 --only guide --step 2x32x8
    tune 60
else
    test_on 180 tests/ops/test_cast.py tests/ops/test_gemm.py tests/ops/test_conv.py tests/conformance
    bench gemm 240 --only gemm --sizes 512,1024,2048,4096,8192 --layouts NN,NT,TN,TT
    bench guide 300 --only guide --step 9x8192x2048
    bench conv 180 --only conv --convs resnet18 --images 64 --no-netcl
    bench attention 90 --only attention --attention 8x16x2048x64
    bench resnet 150 --only resnet --resnet 64x128 --no-netcl
    timeline timeline-guide 60 --only guide --step 9x8192x2048
    timeline timeline-resnet 60 --only resnet --resnet 64x128
    tune 180
    bench netcl 300 --only conv,resnet --images 64 --resnet 64x128 # last: netcl tries kernels for minutes
fi

printf '\n%s\n' "$OUT"
cat "$OUT/steps.txt"
exit "$STATUS"
