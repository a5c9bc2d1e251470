#!/usr/bin/env bash
# train.sh MPIEXEC MPI_TRAIN DCPTOOL: the example continues on other numbers of ranks, and what it leaves is whole.
set -euo pipefail
mpiexec=$1 train=$2 dcptool=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# As root, and on fewer cores than ranks.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_btl_base_warn_component_unused=0

step=0
for ranks in 2 3 1; do
    said=$("$mpiexec" -n $ranks "$train" "$work/ckpt" | grep -v '^$')
    [ "$said" = "$ranks ranks: steps $step to $((step + 10))" ] || { echo "$ranks ranks said: $said"; exit 1; }
    step=$((step + 10))
    "$dcptool" verify -q "$work/ckpt"
done
[ "$("$dcptool" cat "$work/ckpt" step)" = "$step" ]
# A checkpoint of something else: all ranks stop, and say why.
"$dcptool" demo -q --size 1MiB "$work/other" >/dev/null
! "$mpiexec" -n 2 "$train" "$work/other" >/dev/null 2>"$work/errors" || { echo "another model was loaded"; exit 1; }
grep -q weight "$work/errors"
