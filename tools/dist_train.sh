#!/usr/bin/env bash
# Train on several processes of this machine, or of several machines that each run this:
#   tools/dist_train.sh CONFIG PROCESSES [option of tools/train.py ...]
# On several machines set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT; MAX_RESTARTS starts a job
# of which a process died so many times again (add --resume auto).
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 CONFIG PROCESSES [option of tools/train.py ...]" >&2
    exit 2
fi
config=$1 processes=$2
shift 2

where=(--standalone)
if [ "${NNODES:-1}" != 1 ]; then
    where=(--nnodes "$NNODES" --node_rank "${NODE_RANK:?is the number of this machine, from 0}"
        --master_addr "${MASTER_ADDR:?is the host of machine 0}" --master_port "${MASTER_PORT:-29500}")
fi
exec "${PYTHON:-python}" -m torch.distributed.run "${where[@]}" --nproc_per_node "$processes" \
    --max_restarts "${MAX_RESTARTS:-0}" \
    "$(dirname "$0")/train.py" "$config" --launcher pytorch "$@"
