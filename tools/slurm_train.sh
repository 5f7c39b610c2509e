#!/usr/bin/env bash
# Train on a Slurm cluster:
#   tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [option of tools/train.py ...]
# GPUS (8) in all, GPUS_PER_NODE (8), CPUS_PER_TASK (5); SRUN_ARGS are further options of srun.
# When one task fails, srun ends the others.
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: $0 PARTITION JOB_NAME CONFIG WORK_DIR [option of tools/train.py ...]" >&2
    exit 2
fi
partition=$1 name=$2 config=$3 work_dir=$4
shift 4

gpus=${GPUS:-8}
per_node=${GPUS_PER_NODE:-8}
if [ "$per_node" -gt "$gpus" ]; then
    per_node=$gpus
fi
# shellcheck disable=SC2086  # SRUN_ARGS are several words
exec srun --partition="$partition" --job-name="$name" --ntasks="$gpus" \
    --ntasks-per-node="$per_node" --gres="gpu:$per_node" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" --kill-on-bad-exit=1 ${SRUN_ARGS:-} \
    "${PYTHON:-python}" -u "$(dirname "$0")/train.py" "$config" --work-dir "$work_dir" \
    --launcher slurm "$@"
