#!/usr/bin/env bash
# From a fresh clone to a first look into a checkpoint: installs what is missing, builds into build/, then lists, verifies and
# slices a checkpoint that four ranks wrote with PyTorch 2.13; then saves one itself, and reshards it. Works from any directory.
set -euo pipefail
cd "$(dirname "$0")/.."

say() {
    printf '\n== %s\n' "$*"
}

run() {
    printf '$ %s\n' "$*"
    "$@"
}

say "installing what is missing"
scripts/deps.sh build
echo "all there"

say "building into build/"
cmake --preset release >/dev/null
# The tests' programs are left out: the tool and what it needs is enough here.
cmake --build build -j "$(nproc)" --target dcptool dcp dcp_static

dcptool=build/bin/dcptool
checkpoint=tests/golden/2.13.0/sharded/ckpt

say "what is in a checkpoint that 4 ranks wrote"
run $dcptool ls $checkpoint

say "is it whole? (structure, coverage, checksums)"
run $dcptool verify $checkpoint

say "two rows of a tensor that is spread over the ranks; only their bytes are read"
run $dcptool cat $checkpoint rows 2:4

say "saving: 4 ranks write a made-up training state, 3 others reload and check it"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
run $dcptool demo --size 16MiB "$work/saved"

say "the same, as 2 x 2 ranks would have written it: weights split both ways"
run $dcptool reshard --mesh 2x2 --place '*.weight=0,1' "$work/saved" "$work/grid"
run $dcptool ls "$work/grid" '*.weight'
run $dcptool verify "$work/grid"

say "done: build/bin/dcptool --help shows the rest"
