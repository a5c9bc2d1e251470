#!/usr/bin/env bash
# wheel.sh SOURCE_DIR BUILD_DIR: builds the wheel, installs it into a fresh environment that has nothing else, and runs a smoke test
# there: saving and loading without NumPy and PyTorch, and no library from outside but those of the C runtime.
set -euo pipefail
source=$(cd "$1" && pwd) build=$2
here=$(cd "$(dirname "$0")" && pwd)
python=${DCP_PYTHON:-$build/venv/bin/python}
[ -x "$python" ] || python=$(command -v python3) || { echo "skipped: no python3"; exit 77; }
for module in scikit_build_core pip venv; do
    "$python" -c "import $module" 2>/dev/null ||
        { echo "skipped: $python has no $module; scripts/interop-env.sh installs it"; exit 77; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index \
    --config-settings=build-dir="$work/build" -w "$work/dist" "$source"
wheel=$(echo "$work"/dist/libdcp-*.whl)
case $wheel in
*-cp311-abi3-*.whl) ;;
*) echo "not a wheel for the stable ABI of 3.11: $wheel"; exit 1 ;;
esac

"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index "$wheel"
cd "$work"
env -u PYTHONPATH "$work/venv/bin/python" -I "$here/smoke.py"

extension=$(env -u PYTHONPATH "$work/venv/bin/python" -I -c 'import libdcp._core; print(libdcp._core.__file__)')
folder=$(dirname "$extension")
ldd "$extension" >"$work/needs"
while read -r name _ place _; do
    case $name in
    linux-vdso* | ld-linux* | /lib*/ld-linux* | libc.so* | libm.so* | libdl.so* | librt.so* | libpthread.so*) ;;
    *) case $place in
        "$folder"/*) ;;
        *) echo "the wheel needs $name from outside: $place"; exit 1 ;;
        esac ;;
    esac
done <"$work/needs"
for file in __init__.py _core.pyi py.typed; do
    [ -f "$folder/$file" ] || { echo "the wheel lacks $file"; exit 1; }
done
[ -x "$folder/dcp-writer" ] || { echo "the wheel lacks dcp-writer, or it cannot be executed"; exit 1; }
if [ -e /usr/share/doc/libssl-dev/copyright ] && [ ! -s "$folder/licenses/libssl-dev.txt" ]; then
    echo "the wheel lacks the licences of what it holds"
    exit 1
fi
echo "$(basename "$wheel"): $(stat -c %s "$wheel") bytes"
