#!/usr/bin/env bash
# check_initialisers.sh INITIALISERS.C HEADER...: every initialiser that a header defines is used in the first file, and none is a
# list of designated members, which C++ does not have before C++20.
set -euo pipefail
file=$1
shift
status=0
for name in $(sed -nE 's/^#define (DCP_[A-Z_]+_INIT) .*/\1/p; s/^#define (DCP_[A-Z_]+_INIT)\\?$/\1/p' "$@"); do
    grep -qw "$name" "$file" || { echo "$name is not used in $file"; status=1; }
done
if grep -nE '^ *\.[a-z_]+ = ' "$@"; then
    echo "designated members: use DCP_INIT or DCP_INIT_WITH"
    status=1
fi
exit $status
