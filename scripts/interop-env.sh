#!/usr/bin/env bash
# Makes the Python environment that the interop tests run in, or brings it up to date. Does nothing when all is there.
#
#     scripts/interop-env.sh [DIRECTORY]      (default: build/venv)
#
# What it holds is pinned in tests/interop/requirements.txt. It comes through pip as pip is set up; a build of PyTorch without CUDA is
# enough, and much smaller: name an index or a folder that has one in PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-build/venv}
wanted=tests/interop/requirements.txt

if cmp -s "$wanted" "$venv/requirements.txt"; then
    exit 0
fi

can_make_venv() {
    python3 -c 'import ensurepip, venv' 2>/dev/null
}

can_make_venv || scripts/deps.sh interop
can_make_venv || { echo "interop-env.sh: python3 with the venv module is needed" >&2; exit 1; }
rm -rf "$venv"
python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$wanted"
"$venv/bin/python" -c 'import torch, numpy, zstandard; print("interop-env.sh: PyTorch", torch.__version__)'
cp "$wanted" "$venv/requirements.txt" # last: a broken installation is made anew
