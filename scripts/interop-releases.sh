#!/usr/bin/env bash
# Runs the interop tests and those of libdcp.torch with other releases of PyTorch, each in an environment of its own. By hand: some take gigabytes.
#
#     scripts/interop-releases.sh [RELEASE...]      (default: 2.1.2 2.7.1 2.9.1 2.13.0 2.15.0)
#
# A release that pip cannot install for this Python is named and passed over. Environments are kept in build/venv-<release>; the
# build in build/ is used as it is. INTEROP_PYTHON names another python3 to make them with.
set -uo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- 2.1.2 2.7.1 2.9.1 2.13.0 2.15.0
python=${INTEROP_PYTHON:-python3}
tests=(golden library saves sharded)
failed=0

install() {
    local release=$1 venv=$2 numpy=numpy
    [ -e "$venv/complete" ] && return
    case $release in 2.[0-2].*) numpy='numpy<2' ;; esac # these were built for NumPy 1
    rm -rf "$venv"
    "$python" -m venv "$venv" &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$release" "$numpy" zstandard \
            $(grep -E "^(safetensors|ml_dtypes|fsspec|s3fs|moto)" tests/interop/requirements.txt) &&
        "$venv/bin/python" -c 'import torch' && touch "$venv/complete"
}

# attempt NAME COMMAND...: runs a part of the tests, and says how it went.
attempt() {
    local name=$1
    shift
    timeout -k 10 900 "$@" >"$venv-$name.log" 2>&1 # Gloo of 2.7 hangs now and then when its groups are destroyed
    case $? in
        0) echo "$release: $name: $(grep -E '^(Ran|OK)' "$venv-$name.log" | tr '\n' ' ')" ;;
        77) echo "$release: $name: skipped" ;;
        124) echo "$release: $name: HANGS, see $venv-$name.log"; failed=1 ;;
        *) echo "$release: $name: FAILED, see $venv-$name.log"; failed=1 ;;
    esac
}

export DCPTOOL=$PWD/build/bin/dcptool SAVE_STATE=$PWD/build/tests/interop_save_state
for release in "$@"; do
    venv=$PWD/build/venv-$release
    if ! install "$release" "$venv" >"$venv.log" 2>&1; then
        echo "$release: not to be had here ($(tail -n 1 "$venv.log"))"
        continue
    fi
    if [[ ! $release =~ ^2\.[0-6]\. ]]; then
        export DCP_PYTHON=$venv/bin/python
        attempt torch tests/python/torch/run.sh build
        attempt convert tests/python/torch/run.sh build --in "$PWD/tests/python/torch_convert"
        for test in tests/python/torch_staging/test_*.py; do
            attempt "staging-$(basename "$test" .py)" tests/python/torch_staging/run.sh build "$(basename "$test" .py)"
        done
    fi
    for name in "${tests[@]}"; do
        DCP_PYTHON=$venv/bin/python attempt "$name" tests/interop/run.sh build "test_$name.py"
    done
done
exit $failed
