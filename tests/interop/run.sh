#!/usr/bin/env bash
# run.sh BUILD_DIR TEST.py: runs a test with the Python that has PyTorch: $DCP_PYTHON, that of BUILD_DIR/venv, or python3.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${DCP_PYTHON:-$1/venv/bin/python}
[ -x "$python" ] || python=$(command -v python3) || { echo "skipped: no python3"; exit 77; }
"$python" -c 'import torch' 2>/dev/null || { echo "skipped: $python has no torch; scripts/interop-env.sh installs it"; exit 77; }
# Nothing here needs more than one thread, and ranks are processes.
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore
exec "$python" "$here/$2"
