#!/bin/bash
# Converts a data set by an array of Slurm jobs, one for each part, and merges the parts when all have succeeded.
#
#   PARTS=16 examples/slurm_convert.sh --cpus-per-task=2 --mem=8G --time=4:00:00 -- SRC DST --shards 64
#
# Options before -- are for sbatch, all others for `dataload convert`. SRC and DST are URLs or on a file system that all
# machines share. Submit it again if jobs have failed: each part keeps the shards that it has finished.
set -euo pipefail

if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    exec dataload convert "$@" --part "$SLURM_ARRAY_TASK_ID/$PARTS"
elif [[ -n ${MERGE:-} ]]; then
    exec dataload convert "$@" --merge
fi

options=()
while [[ $# -gt 0 && $1 != -- ]]; do
    options+=("$1")
    shift
done
if [[ $# -eq 0 || -z ${PARTS:-} ]]; then
    echo "usage: PARTS=N $0 [SBATCH OPTION]... -- SRC DST --shards N [OPTION OF dataload convert]..." >&2
    exit 2
fi
shift
submit() { sbatch --parsable "${options[@]}" "$@"; }
array=$(submit --array="1-$PARTS" --export="ALL,PARTS=$PARTS" "$0" "$@")
merge=$(submit --dependency="afterok:$array" --kill-on-invalid-dep=yes --export=ALL,MERGE=1 "$0" "$@")
echo "submitted parts 1 to $PARTS as array $array, and the merge as job $merge"
