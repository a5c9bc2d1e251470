#!/usr/bin/env bash
# run.sh BUILD_DIR TEST...: runs tests of staging (test_npu, test_async.Results) with the Python that has PyTorch: $DCP_PYTHON, that
# of BUILD_DIR/venv, or python3.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) build=$(cd "$1" && pwd)
export DCP_FAKE_ACL=$build/tests/devices/acl/libascendcl.so DCP_FAKE_CUDA=$build/tests/devices/cuda/libcuda.so.1
shift
python=${DCP_PYTHON:-$build/venv/bin/python}
[ -x "$python" ] || python=$(command -v python3) || { echo "skipped: no python3"; exit 77; }
"$python" -c 'import torch' 2>/dev/null || { echo "skipped: $python has no torch; scripts/interop-env.sh installs it"; exit 77; }
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$build/python:$here:$here/../torch
cd "$here"
exec "$python" -X faulthandler -m unittest -v "$@"
