#!/usr/bin/env bash
# Runs every row that concerns a device on real hardware and prints a report to send in.
#
#     scripts/device-check.sh npu|cuda [MIB]
#
# The vendor's library is found as by any program: for Ascend, source the toolkit's set_env.sh first. MIB is the size of the state,
# 256 unless given otherwise. The rows of libdcp.torch are run by $DCP_PYTHON, or python3, where that has PyTorch for the device (and
# torch_npu). Exits with 0 if all rows are well, 1 if not, 77 if there is no device.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in npu | cuda) ;; *) echo "usage: scripts/device-check.sh npu|cuda [MIB]" >&2; exit 2 ;; esac

{
    cmake --preset release
    cmake --build build --target device_check
    cmake --build build --target dcp_python || echo "libdcp.torch: not built" >&2
} >/dev/null
echo "$(uname -srm), $(git describe --always --dirty 2>/dev/null || echo "no git")"
if [ "$1" = cuda ]; then
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || true
else
    npu-smi info 2>/dev/null | head -n 12 || true
    cat "${ASCEND_HOME_PATH:-/usr/local/Ascend/ascend-toolkit/latest}"/version.cfg 2>/dev/null || true
fi
result=0
build/tests/device_check "$@" || result=$?
python=${DCP_PYTHON:-python3}
if [ -e build/python/libdcp/_core.abi3.so ] && "$python" -c 'import torch' 2>/dev/null; then
    PYTHONPATH=build/python "$python" tests/python/device_check.py "$@" || { code=$?; [ $code = 77 ] || result=1; }
else
    echo "libdcp.torch: skipped, $python has no PyTorch" >&2
fi
exit $result
