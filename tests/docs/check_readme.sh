#!/usr/bin/env bash
# check_readme.sh SOURCE_DIR DCPTOOL: the program in README.md is examples/first.c, and each "$ dcptool" line in it prints what
# README.md shows below it.
set -euo pipefail
source_dir=$1 dcptool=$2
cd "$source_dir"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

sed -n '/^```c$/,/^```$/p' README.md | sed '1d;$d' | diff - examples/first.c

dcptool() {
    "$dcptool" "$@"
}

# The session is the indented block: commands after "$ ", then their output.
awk '/^    \$ dcptool / { on = 1 } on && !/^    / && !/^$/ { exit } on { sub(/^    /, ""); print }' README.md |
    sed -e :a -e '/^\n*$/{$d;N;ba' -e '}' >"$work/shown"
grep -q '^\$ dcptool ' "$work/shown"
while IFS= read -r line; do
    echo "$line"
    eval "${line#??}" </dev/null
    echo
done < <(grep '^\$ ' "$work/shown") >"$work/real" 2>&1 || true
diff <(grep -v '^$' "$work/shown") <(grep -v '^$' "$work/real")
