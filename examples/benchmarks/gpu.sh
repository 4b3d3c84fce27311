#!/bin/sh
# Tests and benchmarks clamp on a machine with an NVIDIA GPU, or on the device that DEVICE names.
#
#   pip install -e ".[test,examples]"
#   examples/benchmarks/gpu.sh                    writes examples/benchmarks/results/<device>-<date>.json
#   DEVICE=pocl examples/benchmarks/gpu.sh --quick
#
# Arguments go to `python -m clamp bench`. PYTHON chooses the interpreter, PYTEST_ARGS what the tests run with.
# The exit status is that of the first step that failed; the benchmark runs even if tests fail.
set -u
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-nvidia}
RESULTS=examples/benchmarks/results

# Containers often hold NVIDIA's OpenCL library without the .icd file that tells the loader of it.
if [ "$DEVICE" = nvidia ] && [ -z "${OCL_ICD_VENDORS:-}" ] && ! grep -qs nvidia /etc/OpenCL/vendors/*.icd; then
    library=$(ldconfig -p | awk '/libnvidia-opencl\.so\.1 / { print $NF; exit }')
    if [ -z "$library" ]; then
        echo "no libnvidia-opencl.so.1: install NVIDIA's driver with OpenCL, or start the container with" \
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility" >&2
        exit 1
    fi
    OCL_ICD_VENDORS=$(mktemp -d)
    trap 'rm -rf "$OCL_ICD_VENDORS"' EXIT
    cp /etc/OpenCL/vendors/*.icd "$OCL_ICD_VENDORS" 2>/dev/null
    echo "$library" >"$OCL_ICD_VENDORS/nvidia.icd"
    export OCL_ICD_VENDORS
fi

status=0
"$PYTHON" -m clamp doctor || status=$?
# shellcheck disable=SC2086  # several arguments
"$PYTHON" -m pytest -q ${PYTEST_ARGS:-} || status=$?
mkdir -p "$RESULTS"
"$PYTHON" -m clamp bench --device "$DEVICE" --json "$RESULTS" "$@" || status=$?
exit "$status"
