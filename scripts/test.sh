#!/usr/bin/env bash
# Builds and tests everything. The last line is "N passed, N failed" (", N skipped" if any were).
#
#     scripts/test.sh              release, address and undefined-behaviour sanitizers, thread sanitizer, clang, lint, style
#     scripts/test.sh --quick      release only
#     scripts/test.sh --long [S]   also every unit test under valgrind, 10,000 random layouts on ranks, and S seconds (60) of fuzzing
#                                  for each target
#
# Installs what is missing first. Logs of each step are in build-logs/.
set -uo pipefail
cd "$(dirname "$0")/.."

mode=normal
fuzz_seconds=60
case ${1:-} in
'') ;;
--quick) mode=quick ;;
--long) mode=long fuzz_seconds=${2:-60} ;;
*) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

jobs=$(nproc)
logs=$PWD/build-logs
passed=0 failed=0 skipped=0
rm -rf "$logs"
mkdir -p "$logs"

# attempt NAME COMMAND...: runs a step, says how it went and how long it took. The log is build-logs/NAME.log.
attempt() {
    local name=$1 start=$SECONDS
    shift
    if "$@" >"$logs/$name.log" 2>&1 </dev/null; then
        printf '  %-28s ok      %4d s\n' "$name" $((SECONDS - start))
    else
        printf '  %-28s FAILED  %4d s, see build-logs/%s.log\n' "$name" $((SECONDS - start)) "$name"
        # The end of a log is often that of another job: show what speaks of an error, if anything does.
        { grep -E -A6 'error:|Error|FAILED|\*\*\*' "$logs/$name.log" || cat "$logs/$name.log"; } | tail -n 60 | sed 's/^/    | /'
        return 1
    fi
}

# A step that is one check by itself.
check() {
    if attempt "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        return 1
    fi
}

# count NAME: adds up what ctest wrote about a run. A run that left no account is a failure.
count() {
    local totals tests failures skips
    totals=$(tr '\n\t' '  ' <"$logs/$1.xml" 2>/dev/null | grep -o '<testsuite [^>]*>')
    tests=$(sed -n 's/.* tests="\([0-9]*\)".*/\1/p' <<<"$totals")
    failures=$(sed -n 's/.* failures="\([0-9]*\)".*/\1/p' <<<"$totals")
    skips=$(sed -n 's/.* skipped="\([0-9]*\)".*/\1/p' <<<"$totals")
    if [ -z "$tests" ] || [ "$tests" -eq 0 ]; then
        failed=$((failed + 1))
        echo "    no tests were run"
        return
    fi
    passed=$((passed + tests - failures - skips))
    failed=$((failed + failures))
    skipped=$((skipped + skips))
    echo "    $tests tests: $((tests - failures - skips)) passed, $failures failed, $skips skipped"
}

build() {
    cmake --preset "$1" -DDCP_WERROR=ON "${@:2}" && cmake --build "$(build_dir "$1")" -j "$jobs"
}

build_dir() {
    if [ "$1" = release ]; then echo build; else echo "build-$1"; fi
}

# build_and_test PRESET [CTEST OPTION...]
build_and_test() {
    local preset=$1
    shift
    echo "$preset:"
    # A build that works is no test, one that does not is a failure.
    if ! attempt "$preset-build" build "$preset"; then
        failed=$((failed + 1))
        return
    fi
    attempt "$preset-test" ctest --test-dir "$(build_dir "$preset")" -j "$jobs" --output-on-failure --no-tests=error \
        --output-junit "$logs/$preset.xml" "$@"
    count "$preset"
}

# The first of the names given that is a program.
first_of() {
    local name
    for name in "$@"; do
        if command -v "$name"; then
            return
        fi
    done
    echo "none of these is installed: $*" >&2
    return 1
}

clang_build() {
    local compiler
    compiler=$(first_of clang-14 clang) && cmake -S . -B build-clang -DCMAKE_C_COMPILER="$compiler" -DDCP_WERROR=ON &&
        cmake --build build-clang -j "$jobs"
}

# Other releases of clang-format break lines elsewhere, so only the one that the tree is formatted with counts.
style() {
    local formatter
    formatter=$(command -v clang-format-14) || { echo "clang-format-14 is not installed: not checked"; return 0; }
    find include src cli python tests fuzz examples -name '*.[ch]' -not -path 'tests/golden/*' -print0 |
        xargs -0 "$formatter" --dry-run -Werror
}

lint() {
    local linter
    linter=$(command -v clang-tidy-14) || { echo "clang-tidy-14 is not installed: not checked"; return 0; }
    # The build of clang knows no option that clang-tidy does not.
    find src cli python -name '*.c' -print0 | xargs -0 -n 4 -P "$jobs" "$linter" -p build-clang --quiet
}

closing_line() {
    local line="$passed passed, $failed failed"
    [ "$skipped" -eq 0 ] || line+=", $skipped skipped"
    echo "$line"
}

main() {
    local groups=(build test python)
    [ $mode != long ] || groups+=(fuzz)
    scripts/deps.sh "${groups[@]}" || { failed=1; return; }

    attempt interop-env scripts/interop-env.sh || failed=$((failed + 1))
    build_and_test release
    [ $mode != quick ] || return
    # What takes minutes with a sanitizer is left to the release build and to --long.
    local slow=(-E '^(engine\.any_layout|engine\.crash_ranks|device\.devices)$') slow_threads=(-E '^(cli\..*|device\.devices)$')
    [ $mode != long ] || slow=() slow_threads=()
    build_and_test asan "${slow[@]}"
    build_and_test tsan -L threads "${slow_threads[@]}"
    echo "other checks:"
    check clang-build clang_build
    check lint lint
    check style style
    [ $mode = long ] || return
    build_and_test valgrind
    check any-layout env DCP_TEST_ROUNDS=7 build/tests/test_any_layout
    echo "fuzzing, $fuzz_seconds s for each target:"
    check fuzz scripts/fuzz.sh "$fuzz_seconds"
}

main
closing_line
[ "$failed" -eq 0 ]
