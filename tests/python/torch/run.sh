#!/usr/bin/env bash
# run.sh BUILD_DIR [--in FOLDER] [TEST...]: runs the tests of libdcp.torch in this folder or another one, or those named
# (test_writer.Ids), with the Python that has PyTorch: $DCP_PYTHON, that of BUILD_DIR/venv, or python3.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) build=$(cd "$1" && pwd)
shift
folder=$here
[ "${1-}" != --in ] || { folder=$2; shift 2; }
python=${DCP_PYTHON:-$build/venv/bin/python}
[ -x "$python" ] || python=$(command -v python3) || { echo "skipped: no python3"; exit 77; }
"$python" -c 'import torch' 2>/dev/null || { echo "skipped: $python has no torch; scripts/interop-env.sh installs it"; exit 77; }
[ -e "$build"/python/libdcp/_core.abi3.so ] || { echo "skipped: built without the Python package"; exit 77; }
# Nothing here needs more than one thread in PyTorch, and ranks are processes.
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$build/python:$here:$folder
cd "$folder"
if [ $# -gt 0 ]; then
    exec "$python" -m unittest -v "$@"
fi
exec "$python" -m unittest discover -v -p 'test_*.py'
