#!/usr/bin/env bash
# check_python.sh SOURCE_DIR BUILD_DIR: the Python program in README.md is examples/first.py, and prints what README.md shows below it.
set -euo pipefail
source_dir=$1 build=$2
cd "$source_dir"
python=${DCP_PYTHON:-$build/venv/bin/python}
[ -x "$python" ] || python=$(command -v python3) || { echo "skipped: no python3"; exit 77; }
"$python" -c 'import numpy, ml_dtypes' 2>/dev/null ||
    { echo "skipped: $python has no numpy or ml_dtypes; scripts/interop-env.sh installs them"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$build/python PYTHONDONTWRITEBYTECODE=1

sed -n '/^```python$/,/^```$/p' README.md | sed '1d;$d' | diff - examples/first.py
awk '/^    \$ python / { on = 1 } on && !/^    / { exit } on { sub(/^    /, ""); print }' README.md >"$work/shown"
read -r dollar name program arguments <"$work/shown"
[ "$dollar $name" = "\$ python" ]
"$python" "$program" ${arguments/%new/$work/new} >"$work/real"
sed 1d "$work/shown" | diff - "$work/real"
