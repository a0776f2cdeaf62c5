#!/bin/bash
# Train on several machines with torchrun. Run it on every machine, at about the same time:
#
#   bash torchrun.sh NUM_MACHINES RANKS_PER_MACHINE FIRST_MACHINE CONFIG.toml RUN_FOLDER
set -euo pipefail

torchrun \
  --nnodes "$1" \
  --nproc-per-node "$2" \
  --rdzv-id bytescale \
  --rdzv-backend c10d \
  --rdzv-endpoint "$3:29500" \
  -m bytescale train "$4" --trainer.run-dir "$5"
