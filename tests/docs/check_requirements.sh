#!/usr/bin/env bash
# check_requirements.sh SOURCE_DIR: every test case that docs/requirements.md names is one of the program that it names, and is run. Of
# programs that run a suite of tests/support a case may be one of the suite. A program with a slash, core/extension, is one of
# tests/python.
set -euo pipefail
cd "$1"
failed=0 checked=0
while read -r program cases; do
    for name in $cases; do
        checked=$((checked + 1))
        case $program in
        */*) # of the Python packages
            grep -qE "^ *def $name\\(self" "tests/python/${program%/*}/test_${program#*/}.py" ||
                { echo "no such test: $program $name"; failed=1; }
            continue ;;
        esac
        grep -qE "(cmocka_unit_test[a-z_]*\\(|^ *run\\(\")$name\b" tests/*/"test_$program.c" ||
            { grep -q '#include "support/.*_suite.h"' tests/*/"test_$program.c" &&
                grep -qE "^ *\\{\"$name\"," tests/support/*_suite.h; } || { echo "no such test: $program $name"; failed=1; }
    done
done < <(grep -E '^\| [BRTU][0-9]' docs/requirements.md | cut -d'|' -f4 | tr ';' '\n' |
    sed -E 's/\([^)]*\)//g; s/[`,]/ /g; s/^ +//; s/ +$//')
echo "$checked test cases named"
[ "$checked" -gt 0 ] && exit $failed
