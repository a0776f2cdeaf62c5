#!/bin/bash
# Train on 4 nodes of 8 GPUs: sbatch slurm.sh CONFIG.toml RUN_FOLDER
#SBATCH --job-name=bytescale
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
# Slurm sends SIGTERM 120 seconds before the time is over: the ranks finish their step, save, and end.
set -euo pipefail

config=$1      # on a disk that all nodes share
run_folder=$2  # too: every rank writes its part of a checkpoint there

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)

# A job that was requeued finds its run folder and goes on from its last checkpoint.
if [ -e "$run_folder/config.toml" ]; then
  what=(--resume "$run_folder")
else
  what=("$config" --trainer.run-dir "$run_folder")
fi

# One torchrun on each node; each starts 8 ranks and finds the others through the first node.
srun torchrun \
  --nnodes "$SLURM_NNODES" \
  --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
  --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$first_node:29500" \
  -m bytescale train "${what[@]}"
