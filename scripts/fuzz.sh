#!/usr/bin/env bash
# Fuzzes every parser for a while.
#
#     scripts/fuzz.sh [SECONDS] [TARGET...]       (default: 60 seconds for each of all targets)
#
# New inputs are collected in build-fuzz/corpus/<target>/, what crashed, hung or took too much memory in
# build-fuzz/artifacts/<target>/. Fails if anything was found. To keep a finding, copy it to fuzz/corpus/<target>/.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
shift || true
case $seconds in '' | *[!0-9]*) echo "usage: scripts/fuzz.sh [SECONDS] [TARGET...]" >&2; exit 2 ;; esac

scripts/deps.sh build fuzz
# The preset names clang-14; any other clang will do where that one is absent.
compiler=$(command -v clang-14 || command -v clang)
cmake --preset fuzz -DCMAKE_C_COMPILER="$compiler" >/dev/null
cmake --build build-fuzz -j "$(nproc)"

targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then
    for source in fuzz/fuzz_*.c; do
        name=${source#fuzz/fuzz_}
        targets+=("${name%.c}")
    done
fi

fuzz_one() {
    local target=$1 dir=build-fuzz dict=()
    mkdir -p "$dir/corpus/$target" "$dir/artifacts/$target"
    [ ! -f "fuzz/$target.dict" ] || dict=("-dict=fuzz/$target.dict")
    "$dir/fuzz/fuzz_$target" "${dict[@]}" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 \
        -artifact_prefix="$dir/artifacts/$target/" "$dir/corpus/$target" "fuzz/corpus/$target" \
        >"$dir/$target.log" 2>&1
}

failed=()
report() {
    local runs
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "build-fuzz/$1.log")
    if wait "$2"; then
        echo "$1: $runs inputs, nothing found"
    else
        echo "$1: FAILED, see build-fuzz/$1.log and build-fuzz/artifacts/$1/"
        failed+=("$1")
    fi
}

# Two at a time.
for ((i = 0; i < ${#targets[@]}; i += 2)); do
    pids=()
    for target in "${targets[@]:i:2}"; do
        echo "$target: fuzzing for $seconds s"
        fuzz_one "$target" &
        pids+=($!)
    done
    for ((j = 0; j < ${#pids[@]}; j++)); do
        wait "${pids[j]}" || true
        report "${targets[i + j]}" "${pids[j]}"
    done
done

if [ ${#failed[@]} -gt 0 ]; then
    echo "findings in: ${failed[*]}"
    exit 1
fi
echo "nothing found in ${#targets[@]} targets"
