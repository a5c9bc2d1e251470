#!/usr/bin/env bash
# Measures what docs/benchmarks.md tells and prints it as a table in Markdown. Takes some minutes; wants a quiet machine.
#
#     scripts/bench.sh
#
# Environment: BENCH_MEMORY, a directory in a memory file system (/dev/shm); BENCH_DISK, one on a disk (build/bench);
# BENCH_MIB, the size of the large state (1536); BENCH_RUNS (5); BENCH_GIB, the size of the checkpoint that is hashed and
# verified (8, twice that is needed on the disk); BENCH_PYTHON, a python3 with torch (build/venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/.."
memory=${BENCH_MEMORY:-/dev/shm} disk=${BENCH_DISK:-build/bench} mib=${BENCH_MIB:-1536} runs=${BENCH_RUNS:-5} gib=${BENCH_GIB:-8}
python=${BENCH_PYTHON:-build/venv/bin/python}
bin=build/bin

{
    cmake --preset release
    cmake --build build --target bench
} >/dev/null
mkdir -p "$disk"
work=$(mktemp -d "$disk/run-XXXXXX")
trap 'rm -rf "$work"' EXIT

echo "$(nproc) cores: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1); load before: $(cut -d' ' -f1-3 /proc/loadavg)"
echo
echo "| what | median | range |"
echo "|---|---|---|"
taskset -c 0 "$bin/bench_save" null "$mib" "$runs" 2>/dev/null
"$bin/bench_save" "$memory" "$mib" "$runs" 2>/dev/null
"$bin/bench_save" "$disk" "$mib" "$runs" 2>/dev/null
"$bin/bench_save" "sync:$disk" "$mib" "$runs" 2>/dev/null
"$bin/bench_async" "$memory" "$mib" "$runs"
"$bin/bench_load" "$memory" "$mib" "$runs"
"$bin/bench_small" "$memory" 100000 1024 "$runs"
if "$python" -c 'import torch' 2>/dev/null; then
    "$python" bench/bench_torch.py "$memory" "$mib" 3
    if [ -e build/python/libdcp/_core.abi3.so ]; then
        echo
        PYTHONPATH=build/python "$python" bench/bench_python_torch.py "$memory" "$work" "$mib" 3
    fi
fi
"$bin/bench_slice"
"$bin/bench_share" "$memory" 256 "$runs"

# All files stay in the page cache, if it is large enough: the commands take turns on the same ones.
"$bin/bench_make_checkpoint" "$work/big" $((gib * 16))
"$bin/bench_command" "$runs" "cat $gib GiB" "cat $work/big/*.distcp" "dcptool verify" "$bin/dcptool verify -q $work/big" \
    "dcptool hash" "$bin/dcptool hash -q $work/big"
"$bin/bench_command" 1 "dcptool copy $gib GiB" "$bin/dcptool copy -f -q --no-sync $work/big $work/copy"
"$bin/bench_command" 1 "dcptool reshard $gib GiB, 8 ranks" "$bin/dcptool reshard -f -q --no-sync --ranks 8 $work/big $work/copy" \
    "2 x 4, both axes" "$bin/dcptool reshard -f -q --no-sync --mesh 2x4 --place '*=1,0' $work/big $work/copy"

mkdir "$work/many-chunks"
python3 bench/gen_metadata.py --tensors 1000 --chunks 1024 --release 2.13 "$work/many-chunks/.metadata"
"$bin/bench_load_plan" "$work/many-chunks" "$runs"

python3 bench/gen_metadata.py --tensors 1000 --chunks 256 --release 2.15 "$work/metadata"
echo
echo '```'
"$bin/bench_metadata" "$work/metadata"
"$bin/bench_metadata_write" 1000 256 "$runs"
"$bin/bench_plan" 256 1000
"$bin/bench_plan" --share 4096 1000
"$bin/bench_plan" --tiling 16384
if [ -e build/python/libdcp/_core.abi3.so ] && "$python" -c 'import numpy' 2>/dev/null; then
    PYTHONPATH=build/python PYTHONWARNINGS=ignore "$python" bench/bench_python.py --dir "$memory"
fi
echo '```'
