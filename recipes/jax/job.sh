#!/bin/bash
# sbatch job.sh                        two ranks on one node, on CPUs
# sbatch --gpus-per-node=4 job.sh      a rank for each GPU
# sbatch --nodes=4 --gpus-per-node=4 job.sh --epochs 90 --batch-size 256
#SBATCH --job-name=jax
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -eu
python prepare.py data # once: from then on it finds the stores

# A rank for each GPU, or for each task where there are none.
ranks=${SLURM_GPUS_ON_NODE:-${HEADRACE_JOB_GPUS_PER_NODE:-0}}
[ "$ranks" -gt 0 ] || ranks=${SLURM_NTASKS_PER_NODE:-${HEADRACE_JOB_TASKS_PER_NODE:-1}}
exec headrace launch --framework jax --ranks-per-node "$ranks" train.py "$@"
