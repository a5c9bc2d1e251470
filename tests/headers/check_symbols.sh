#!/usr/bin/env bash
# check_symbols.sh CC LIBRARY HEADER...: what the shared library exports is what its headers declare, no more, no less.
set -euo pipefail
cc=$1 library=$2
shift 2

# The last word before the parenthesis of every DCP_API declaration, comments removed.
declared=$(for header in "$@"; do
    "$cc" -fpreprocessed -dD -E -P "$header" 2>/dev/null
done | grep -v '^#' | tr '\n' ' ' | grep -oE 'DCP_API [^;({]*\(' | sed -E 's/.*[ *]([a-z0-9_]+)\($/\1/' | sort -u)
exported=$(nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort -u)

extra=$(comm -13 <(echo "$declared") <(echo "$exported"))
missing=$(comm -23 <(echo "$declared") <(echo "$exported"))
[ -z "$extra" ] || echo "exported but not declared:" $extra
[ -z "$missing" ] || echo "declared but not exported:" $missing
echo "$(wc -w <<<"$exported") symbols exported, $(wc -w <<<"$declared") declared"
[ -n "$exported" ] && [ -z "$extra" ] && [ -z "$missing" ]
