#!/usr/bin/env bash
# run.sh BUILD_DIR FOLDER/TEST.py [MODULE...]: runs a test of the Python package in the build tree with $DCP_PYTHON, the Python of
# BUILD_DIR/venv, or python3. Skipped if a module that it needs is not there.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$1 test=$2
shift 2
python=${DCP_PYTHON:-$build/venv/bin/python}
[ -x "$python" ] || python=$(command -v python3) || { echo "skipped: no python3"; exit 77; }
for module in "$@"; do
    "$python" -c "import $module" 2>/dev/null ||
        { echo "skipped: $python has no $module; scripts/interop-env.sh installs it"; exit 77; }
done
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=$build/python:$here${PYTHONPATH:+:$PYTHONPATH}
export LD_PRELOAD=${DCP_PRELOAD-} # of a sanitizer
exec "$python" -X faulthandler "$here/$test"
