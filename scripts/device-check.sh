#!/usr/bin/env bash
# Runs every row that concerns a device on real hardware and prints a report to send in.
#
#     scripts/device-check.sh npu|cuda [MIB]
#
# The vendor's library is found as by any program: for Ascend, source the toolkit's set_env.sh first. MIB is the size of the state,
# 256 unless given otherwise. Exits with 0 if all rows are well, 1 if not, 77 if there is no device.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in npu | cuda) ;; *) echo "usage: scripts/device-check.sh npu|cuda [MIB]" >&2; exit 2 ;; esac

{
    cmake --preset release
    cmake --build build --target device_check
} >/dev/null
echo "$(uname -srm), $(git describe --always --dirty 2>/dev/null || echo "no git")"
if [ "$1" = cuda ]; then
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || true
else
    npu-smi info 2>/dev/null | head -n 12 || true
    cat "${ASCEND_HOME_PATH:-/usr/local/Ascend/ascend-toolkit/latest}"/version.cfg 2>/dev/null || true
fi
build/tests/device_check "$@"
